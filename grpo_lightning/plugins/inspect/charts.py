"""Charts as inline SVG: text alone, without a library, a script or a style of its own.

Colours come from the page: a series stands in a group of class `a0`, `a1` ..., and its parts take `currentColor`.
"""

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40
"""The margins around the plot, in the units of the view box."""
MOST_DOTS = 25
"""A mean with so many points at most has them marked; under the pointer each shows its numbers."""
OUTLYING = 10
"""The y axis leaves out what would make it so many times as long as the middle 96 % of the values need."""


@dataclass(frozen=True)
class Series:
    """What is drawn of one arm. A line is a list of pieces, which gaps separate."""

    name: str
    number: int
    """Its colour."""
    mean: list[list[Point]]
    band: list[list[tuple[float, float, float]]] = field(default_factory=list)
    seeds: list[list[list[Point]]] = field(default_factory=list)
    labels: dict[float, str] = field(default_factory=dict)

    def points(self) -> Iterator[Point]:
        """The points of all lines."""
        return (point for line in (self.mean, *self.seeds) for piece in line for point in piece)


@dataclass(frozen=True)
class Scale:
    """A range of values, laid over a range of the picture."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> str:
        """The coordinate, to a tenth."""
        fraction = (value - self.low) / (self.high - self.low)
        return f"{self.start + fraction * (self.end - self.start):.1f}"


@dataclass(frozen=True)
class XAxis:
    """What the charts of a page have in common."""

    low: float
    high: float
    label: str
    whole: bool
    """Whether x is a count, whose ticks are whole numbers."""


def chart(series: Sequence[Series], title: str, axis: XAxis, lines: Sequence[float] = ()) -> str:
    """The chart as an SVG element."""
    x = Scale(*padded([axis.low, axis.high], 0.0), LEFT, WIDTH - RIGHT)
    y = Scale(*y_range(series, lines), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        *_axes(x, y, axis),
        *(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>' for value in lines),
        f'<svg x="{LEFT - 4}" y="{TOP - 4}" width="{WIDTH - RIGHT - LEFT + 8}" height="{HEIGHT - BOTTOM - TOP + 8}" '
        f'viewBox="{LEFT - 4} {TOP - 4} {WIDTH - RIGHT - LEFT + 8} {HEIGHT - BOTTOM - TOP + 8}">',
        *(_drawn(one, x, y) for one in series),
        "</svg></svg>",
    ]
    return "".join(parts)


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


def _axes(x: Scale, y: Scale, axis: XAxis) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    for value in ticks(y.low, y.high, 5):
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y(value)}" dy="0.35em" text-anchor="end">{value:.6g}</text>'
    yield f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    for value in ticks(x.low, x.high, 6, axis.whole):
        yield f'<line class="base" x1="{x(value)}" x2="{x(value)}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield f'<text class="tick" x="{x(value)}" y="{bottom + 16}" text-anchor="middle">{value:.6g}</text>'
    yield f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{html.escape(axis.label)}</text>'


def _drawn(one: Series, x: Scale, y: Scale) -> str:
    parts = [f'<g class="a{one.number}">']
    for piece in one.band:
        edge = [*((px, high) for px, _, high in piece), *((px, low) for px, low, _ in reversed(piece))]
        parts.append(f'<polygon class="band" points="{_points(edge, x, y)}"/>')
    parts += [_line(piece, "seed", x, y) for line in one.seeds for piece in line]
    parts += [_line(piece, "mean", x, y) for piece in one.mean]
    drawn = [point for piece in one.mean for point in piece]
    kind = "dot" if len(drawn) <= MOST_DOTS else "dot unseen"
    for px, py in drawn:
        title = html.escape(one.labels.get(px, one.name))
        parts.append(f'<circle class="{kind}" cx="{x(px)}" cy="{y(py)}" r="2.6"><title>{title}</title></circle>')
    return "".join([*parts, "</g>"])


def _line(piece: Sequence[Point], kind: str, x: Scale, y: Scale) -> str:
    if len(piece) == 1:
        return f'<circle class="{kind} alone" cx="{x(piece[0][0])}" cy="{y(piece[0][1])}" r="1.5"/>'
    return f'<polyline class="{kind}" points="{_points(piece, x, y)}"/>'


def _points(points: Iterable[Point], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(px)},{y(py)}" for px, py in points)
