"""Charts as inline SVG: a template without a script or a style of its own, and its numbers.

Colours come from the page: a series stands in a group of class `a0`, `a1` ..., and its parts take `currentColor`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from grpo_lightning.plugins.looking.pages.markup import filled

Point = tuple[float, float]

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40  # the margins around the plot, in the units of the view box
MOST_DOTS = 25  # a mean with so many points at most has them marked; under the pointer each shows its numbers
OUTLYING = 10  # the y axis leaves out what would make it so many times as long as the middle 96 % of the values need


@dataclass(frozen=True)
class Series:
    """What is drawn of one arm. A line is a list of pieces, which gaps separate."""

    name: str
    number: int  # its colour
    mean: list[list[Point]]
    band: list[list[tuple[float, float, float]]] = field(default_factory=list)
    seeds: list[list[list[Point]]] = field(default_factory=list)
    labels: dict[float, str] = field(default_factory=dict)

    def points(self) -> Iterator[Point]:
        """The points of all lines."""
        return (point for line in (self.mean, *self.seeds) for piece in line for point in piece)


@dataclass(frozen=True)
class XAxis:
    """What the charts of a page have in common."""

    low: float
    high: float
    label: str
    whole: bool  # whether x is a count, whose ticks are whole numbers


def chart(series: Sequence[Series], title: str, axis: XAxis, lines: Sequence[float] = ()) -> Markup:
    """The chart as an SVG element."""
    x_ends, y_ends = padded([axis.low, axis.high], 0.0), y_range(series, lines)
    box = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP}
    shown = {"series": series, "title": title, "label": axis.label, "lines": lines, "most_dots": MOST_DOTS}
    scales = {"x": scale(*x_ends, LEFT, WIDTH - RIGHT), "y": scale(*y_ends, HEIGHT - BOTTOM, TOP)}
    x_ticks, y_ticks = ticks(*x_ends, 6, axis.whole), ticks(*y_ends, 5)
    return filled("chart.svg", **box, **shown, **scales, bottom=HEIGHT - BOTTOM, x_ticks=x_ticks, y_ticks=y_ticks)


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], str]:
    """From a value between low and high to its coordinate between start and end, to a tenth."""
    return lambda value: f"{start + (value - low) / (high - low) * (end - start):.1f}"


def y_range(series: Sequence[Series], lines: Sequence[float] = ()) -> tuple[float, float]:
    """From least to most of what is drawn, without outliers.

    Bands widen it by half at most to each side, and not below 0 where no value is; they may go on outside.
    """
    values = sorted(py for one in series for _, py in one.points())
    inner = values[len(values) // 50 : len(values) - len(values) // 50]
    if values[-1] - values[0] > OUTLYING * (inner[-1] - inner[0]) > 0:
        low, high = padded([*inner, *lines], 0.05)[0], padded([*inner, *lines], 0.25)[1]
    else:
        low, high = padded([*values, *lines], 0.05)
    edges = [edge for one in series for piece in one.band for _, *both in piece for edge in both]
    room = 0.5 * (high - low)
    least = max(low - room, min([low, *edges]))
    if min([values[0], *lines]) >= 0:
        least = max(least, min(low, 0.0))
    return least, min(high + room, max([high, *edges]))


def outside(series: Sequence[Series], lines: Sequence[float] = ()) -> list[float]:
    """The values of the lines that the chart leaves out, in order."""
    low, high = y_range(series, lines)
    drawn = [py for one in series for line in one.seeds or [one.mean] for piece in line for _, py in piece]
    return sorted(py for py in drawn if not low <= py <= high)


def padded(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Least and most of the values with a margin, as a fraction of their distance; never equal."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        half = 0.5 * abs(low) or 0.5
        return low - half, high + half
    return low - margin * (high - low), high + margin * (high - low)


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers between the ends, `most` at most: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20):
        step = max(1.0, factor * power) if whole else factor * power
        indices = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        if len(indices) <= most:
            break
    return [index * step for index in indices]
