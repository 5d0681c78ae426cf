"""Charts as inline SVG: a template without script or style, and its numbers.

Colours come from the page: a series stands in a group of class `a0`, `a1` ..., and its elements take `currentColor`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from grpo_lightning.plugins.looking.pages.markup import filled

Point = tuple[float, float]

# All lengths are in the units of the view box: the size of the chart, and the margins around the plot.
WIDTH = 440
HEIGHT = 250
LEFT = 56
RIGHT = 14
TOP = 12
BOTTOM = 40

MOST_DOTS = 25
"""The most points of a mean that are marked; under the pointer each shows its numbers."""
OUTLYING = 10
"""The y axis leaves out values that would make it so many times as long as the middle 96 % of the values need."""


@dataclass(frozen=True)
class Series:
    """The lines of one arm. A line is a list of pieces, which gaps separate."""

    name: str
    """The arm's name."""
    number: int
    """The number of the arm's colour."""
    mean: list[list[Point]]
    """The line of the mean over the seeds."""
    band: list[list[tuple[float, float, float]]] = field(default_factory=list)
    """The pieces of the interval around the mean, as (x, low, high)."""
    seeds: dict[str, list[list[Point]]] = field(default_factory=dict)
    """The line of each seed. That of a single seed is the mean."""
    labels: dict[float, str] = field(default_factory=dict)
    """The text under the pointer, by x of the mean."""

    def points(self) -> Iterator[Point]:
        """The points of all lines."""
        return (point for line in (self.mean, *self.seeds.values()) for piece in line for point in piece)


@dataclass(frozen=True)
class XAxis:
    """The x axis that the charts of a page have in common."""

    low: float
    """The smallest x of all charts."""
    high: float
    """The largest x of all charts."""
    label: str
    """The text below the axis."""
    is_count: bool
    """True if x is a count, whose ticks are whole numbers."""


@dataclass(frozen=True)
class CurveFigure:
    """The curves of one scalar along one axis, to be drawn on the page or into files."""

    name: str
    """The scalar."""
    axis: XAxis
    """The axis, which all figures of a section have in common."""
    series: list[Series]
    """The lines of each arm; the first is the base."""
    lines: list[float]
    """The thresholds, which are drawn across."""
    facts: list[str]
    """What the caption says below the name."""

    @property
    def is_empty(self) -> bool:
        """True if no value is finite."""
        return not any(any(arm.points()) for arm in self.series)

    def svg(self) -> Markup:
        """Returns the chart for the page; nothing if no value is finite."""
        return (
            Markup()
            if self.is_empty
            else chart(self.series, f"{self.name} over {self.axis.label}", self.axis, self.lines)
        )


def chart(series: Sequence[Series], title: str, axis: XAxis, lines: Sequence[float] = ()) -> Markup:
    """Returns the chart as an SVG element, with a horizontal line at each of `lines`."""
    x_ends = padded([axis.low, axis.high], 0.0)
    y_ends = y_range(series, lines)
    box = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP}
    shown = {"series": series, "title": title, "label": axis.label, "lines": lines, "most_dots": MOST_DOTS}
    scales = {"x": scale(*x_ends, LEFT, WIDTH - RIGHT), "y": scale(*y_ends, HEIGHT - BOTTOM, TOP)}
    x_ticks = ticks(*x_ends, 6, axis.is_count)
    y_ticks = value_ticks(series, lines)
    return filled("chart.svg", **box, **shown, **scales, bottom=HEIGHT - BOTTOM, x_ticks=x_ticks, y_ticks=y_ticks)


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], str]:
    """Returns a function from a value between low and high to its coordinate between start and end, to a tenth."""
    return lambda value: f"{start + (value - low) / (high - low) * (end - start):.1f}"


def y_range(series: Sequence[Series], lines: Sequence[float] = ()) -> tuple[float, float]:
    """Returns the ends of the y axis, around all values but outliers.

    Bands widen the axis by half at most to each side, and not below 0 if no value is; they may go on outside.
    """
    values = sorted(py for arm in series for _, py in arm.points())
    inner = values[len(values) // 50 : len(values) - len(values) // 50]
    if values[-1] - values[0] > OUTLYING * (inner[-1] - inner[0]) > 0:
        low, _ = padded([*inner, *lines], 0.05)
        _, high = padded([*inner, *lines], 0.25)
    else:
        low, high = padded([*values, *lines], 0.05)

    edges = [edge for arm in series for piece in arm.band for _, *ends in piece for edge in ends]
    room = 0.5 * (high - low)
    bottom = max(low - room, min([low, *edges]))
    if min([values[0], *lines]) >= 0:
        bottom = max(bottom, min(low, 0.0))
    return bottom, min(high + room, max([high, *edges]))


def value_ticks(series: Sequence[Series], lines: Sequence[float] = ()) -> list[float]:
    """Returns the numbers on the y axis; around a single value nothing was measured, so it is alone."""
    values = [*lines, *(py for arm in series for _, py in arm.points())]
    if math.isclose(min(values), max(values), rel_tol=1e-12):
        return values[:1]
    return ticks(*y_range(series, lines), 5)


def outside(series: Sequence[Series], lines: Sequence[float] = ()) -> list[float]:
    """Returns the values of the lines that the chart leaves out, in order."""
    low, high = y_range(series, lines)
    values = [py for arm in series for line in [*arm.seeds.values()] or [arm.mean] for piece in line for _, py in piece]
    return sorted(py for py in values if not low <= py <= high)


def padded(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Returns the extremes of the values with a margin, a fraction of their distance; they are never equal."""
    low = min(values)
    high = max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        half = 0.5 * abs(low) or 0.5
        return low - half, high + half
    return low - margin * (high - low), high + margin * (high - low)


def ticks(low: float, high: float, max_ticks: int, is_count: bool = False) -> list[float]:
    """Returns at most `max_ticks` round numbers between the ends: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    for factor in (1, 2, 5, 10, 20):
        step = max(1.0, factor * power) if is_count else factor * power
        indices = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        if len(indices) <= max_ticks:
            break
    return [index * step for index in indices]
