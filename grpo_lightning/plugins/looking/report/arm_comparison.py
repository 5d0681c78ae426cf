"""The arms of an experiment compared over their seeds: curves, statistics of curves, differences seed by seed.

The last value and the mean are taken where all runs of all arms have been: from the latest first x to the earliest
last x, with straight lines between the points. A value that is not finite is a gap; a run whose statistic meets one
does not count for it.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from grpo_lightning.maths.metrics import half_width
from grpo_lightning.plugins.looking.run_files.run_scalars import Scalars
from grpo_lightning.types import UsageError

Arms = dict[str, dict[str, Scalars]]
Array = np.ndarray

AXES = {
    "step": "exploration steps",
    "update": "optimizer updates",
    "seconds": "seconds of training",
    "tokens": "sampled tokens",
}
SUMMED = {"seconds": "time/step", "tokens": "rollout/tokens"}
"""The scalar, logged once per exploration step, whose sum so far is x: time is without validation."""

ENOUGH = 3  # seeds from which on an interval is drawn: with two it is 12.7 standard errors wide to each side


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval."""

    mean: float
    half: float  # half the width of the 95 % interval; NaN where there is none: below two seeds
    n: int

    @property
    def excludes_zero(self) -> bool:
        """True where 0 lies outside the interval."""
        return abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval, t * s / √n, of the values that are finite."""
    finite = [value for value in values if math.isfinite(value)]
    mean = float(np.mean(finite)) if finite else math.nan
    squares = sum((value - mean) ** 2 for value in finite)
    return Estimate(mean, half_width(len(finite), 0.0, squares), len(finite))


def with_interval(of: Estimate, sign: str = "") -> str:
    """Mean ± half, with two digits of the half; three significant digits where there is no half, or it is 0."""
    if not math.isfinite(of.half):
        return f"{of.mean:{sign}.3g}"
    if of.half <= 1e-9 * abs(of.mean):
        return f"{of.mean:{sign}.4g} ± 0"
    if of.half < 1e-5:
        return f"{of.mean:{sign}.3g} ± {of.half:.2g}"
    decimals = min(6, max(0, 1 - math.floor(math.log10(of.half))))
    return f"{of.mean:{sign}.{decimals}f} ± {of.half:.{decimals}f}"


@dataclass(frozen=True)
class Metric:
    """A scalar and the statistic of its curve."""

    name: str
    statistic: str = "last"
    threshold: float = math.nan

    @classmethod
    def parse(cls, text: str) -> "Metric":
        """`name`, `name:last`, `name:mean`, `name>=number` or `name<=number`."""
        form = re.fullmatch(r"([^:<>=\s]+)\s*(?::(last|mean)|(>=|<=)\s*(\S+))?", text)
        with suppress(ValueError):  # what should be a number is none
            if form is not None:
                name, statistic, sign, number = form.groups()
                return cls(name, sign, float(number)) if sign else cls(name, statistic or "last")
        raise UsageError(f"metric {text!r}: give a scalar's name, or name:mean, name>=number, name<=number")

    @property
    def is_threshold(self) -> bool:
        """True where the statistic is where a threshold is reached."""
        return self.statistic in (">=", "<=")

    def label(self, axis: str, end: float) -> str:
        """The head of the metric's column; `end` is the last x where all runs have been."""
        if self.is_threshold:
            return f"{AXES[axis]} to {self.name} {'≥' if self.statistic == '>=' else '≤'} {self.threshold:g}"
        return f"{self.name} at {end:.4g}" if self.statistic == "last" else f"{self.name}, mean to {end:.4g}"


@dataclass(frozen=True)
class Curve:
    """One scalar of one run, a point per exploration step; K points."""

    step: Array  # [K] exploration steps done, rising; 0 before training
    x: Array  # [K] the axis: steps, updates, seconds or tokens so far
    y: Array  # [K] the values; NaN is a gap


@dataclass(frozen=True)
class Cell:
    """One metric of one arm."""

    values: dict[str, float]
    """The statistic by seed: NaN where a run does not count, infinite where the threshold was never reached."""
    estimate: Estimate
    difference: Estimate | None
    """To the first arm, over the seeds of both; None for the first arm and where a run never reached the threshold."""


@dataclass(frozen=True)
class Table:
    """Every metric of every arm, along one axis."""

    axis: str
    labels: list[str]
    cells: dict[str, list[Cell]]


def curve(scalars: Scalars, name: str, axis: str) -> Curve | None:
    """One scalar of a run along an axis; None if the run has not logged it."""
    if not scalars.get(name):
        return None
    steps, values = (np.array(column, dtype=float) for column in zip(*scalars[name], strict=True))
    counted = dict.fromkeys(range(int(steps[-1]) + 1), 1.0)
    if axis in SUMMED:
        if SUMMED[axis] not in scalars:
            raise ValueError(f"{SUMMED[axis]} has not been logged; it is needed for x")
        counted = dict(scalars[SUMMED[axis]])
    elif axis == "update":  # not logged by a run with one update per step
        counted |= dict(scalars.get("optim/updates", []))
    total = np.append(0.0, np.cumsum([*counted.values()]))
    x = total[np.searchsorted([*counted], steps, side="right")]
    return Curve(steps + 1, x, np.where(np.isfinite(values), values, np.nan))


def statistic(of: Curve, metric: Metric, start: float, end: float) -> float:
    """The metric's value for one run; `start` and `end` bound the x where all runs have been."""
    if metric.is_threshold:
        reached = of.y >= metric.threshold if metric.statistic == ">=" else of.y <= metric.threshold
        return float(of.x[reached][0]) if reached.any() else math.inf
    if end < of.x[0]:  # the others had ended before this run's first value
        return math.nan
    if metric.statistic == "last" or end <= start:
        return float(np.interp(end, of.x, of.y))
    x = np.unique(np.concatenate([[start, end], of.x[(of.x > start) & (of.x < end)]]))
    return float(np.trapezoid(np.interp(x, of.x, of.y), x) / (end - start))


def curves(arms: Arms, name: str, axis: str) -> dict[str, dict[str, Curve]]:
    """The curves of one scalar by arm and seed, of the runs that have logged it."""
    return {
        arm: {seed: one for seed, run in runs.items() if (one := curve(run, name, axis)) is not None}
        for arm, runs in arms.items()
    }


def compare(arms: Arms, metrics: Sequence[Metric], axis: str = "step") -> Table:
    """Every metric of every arm; the differences are to the first."""
    table = Table(axis, [], {arm: [] for arm in arms})
    for metric in metrics:
        found = curves(arms, metric.name, axis)
        present = [one for by_seed in found.values() for one in by_seed.values()]
        start = max((one.x[0] for one in present), default=math.nan)
        end = min((one.x[-1] for one in present), default=math.nan)
        table.labels.append(metric.label(axis, end))
        first: dict[str, float] = {}
        for arm, runs in arms.items():
            own = {seed: statistic(one, metric, start, end) for seed, one in found[arm].items()}
            values = dict.fromkeys(runs, math.nan) | own
            has_paired = first and math.inf not in (*values.values(), *first.values())
            paired = estimate([values[seed] - first[seed] for seed in values if seed in first]) if has_paired else None
            table.cells[arm].append(Cell(values, estimate(list(values.values())), paired))
            first = first or values
    return table


def shown(cell: Cell) -> str:
    """The table's text for an arm's own value."""
    of, seeds = cell.estimate, len(cell.values)
    if math.inf in cell.values.values():
        return f"{of.mean:.3g} ({of.n} of {seeds})" if of.n else f"never (0 of {seeds})"
    if of.n == 0:
        return "–"
    return with_interval(of) if of.n == seeds else f"{with_interval(of)} (n = {of.n})"


def coarsened(of: Curve, width: int) -> Curve:
    """The curve with a point per `width` exploration steps: the means of x and y. The last may have fewer."""
    bins = (of.step - 1) // width
    starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
    x, y, finite = (np.split(values, starts[1:]) for values in (of.x, of.y, np.isfinite(of.y)))
    means = [one[known].mean() if known.any() else np.nan for one, known in zip(y, finite, strict=True)]
    return Curve((bins[starts] + 1) * width, np.array([one.mean() for one in x]), np.array(means))


def means(curves: Sequence[Curve]) -> list[tuple[float, Estimate]]:
    """Of several seeds at each exploration step: mean x, and mean and interval of y. Gaps are left out."""
    points: dict[float, list[tuple[float, float]]] = {}
    for one in curves:
        for step, x, y in zip(one.step, one.x, one.y, strict=True):
            if np.isfinite(y):
                points.setdefault(step, []).append((x, y))
    columns = (zip(*points[step], strict=True) for step in sorted(points))
    return [(float(np.mean(x)), estimate(y)) for x, y in columns]
