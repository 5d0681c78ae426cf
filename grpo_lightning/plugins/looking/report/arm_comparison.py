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

ENOUGH = 3
"""Seeds from which on an interval is drawn: with two seeds it is 12.7 standard errors wide to each side."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval."""

    mean: float
    """The mean of the finite values; NaN without any."""
    half: float
    """Half the width of the 95 % interval; NaN below two seeds."""
    n: int
    """Seeds with a finite value."""

    @property
    def excludes_zero(self) -> bool:
        """True if 0 lies outside the interval."""
        return abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Returns mean and 95 % interval, t * s / √n, of the values that are finite."""
    finite = [value for value in values if math.isfinite(value)]
    mean = float(np.mean(finite)) if finite else math.nan
    squares = sum((value - mean) ** 2 for value in finite)
    return Estimate(mean, half_width(len(finite), 0.0, squares), len(finite))


def with_interval(estimate: Estimate, sign: str = "") -> str:
    """Returns mean ± half, with two digits of the half; three or four significant digits without an interval."""
    mean = estimate.mean
    half = estimate.half
    if not math.isfinite(half):
        return f"{mean:{sign}.3g}"
    if half <= 1e-9 * abs(mean):
        return f"{mean:{sign}.4g} ± 0"
    if half < 1e-5:
        return f"{mean:{sign}.3g} ± {half:.2g}"
    decimals = min(6, max(0, 1 - math.floor(math.log10(half))))
    return f"{mean:{sign}.{decimals}f} ± {half:.{decimals}f}"


@dataclass(frozen=True)
class Metric:
    """A scalar and the statistic of its curve."""

    name: str
    """The name of the scalar."""
    statistic: str = "last"
    """`last`, `mean`, or `>=` and `<=` for the x where the threshold is reached first."""
    threshold: float = math.nan
    """The threshold of `>=` and `<=`."""

    @classmethod
    def parse(cls, text: str) -> "Metric":
        """Reads `name`, `name:last`, `name:mean`, `name>=number` or `name<=number`."""
        form = re.fullmatch(r"([^:<>=\s]+)\s*(?::(last|mean)|(>=|<=)\s*(\S+))?", text)
        with suppress(ValueError):  # the threshold is no number
            if form is not None:
                name, statistic, sign, number = form.groups()
                return cls(name, sign, float(number)) if sign else cls(name, statistic or "last")
        raise UsageError(f"metric {text!r}: give a scalar's name, or name:mean, name>=number, name<=number")

    @property
    def is_threshold(self) -> bool:
        """True if the statistic is the x where a threshold is reached."""
        return self.statistic in (">=", "<=")

    def label(self, axis: str, end: float) -> str:
        """Returns the head of the metric's column; `end` is the last x where all runs have been."""
        if self.is_threshold:
            return f"{AXES[axis]} to {self.name} {'≥' if self.statistic == '>=' else '≤'} {self.threshold:g}"
        return f"{self.name} at {end:.4g}" if self.statistic == "last" else f"{self.name}, mean to {end:.4g}"


@dataclass(frozen=True)
class Curve:
    """One scalar of one run, a point per exploration step; K points."""

    step: Array
    """[K] exploration steps done, rising; 0 before training."""
    x: Array
    """[K] steps, updates, seconds or tokens so far."""
    y: Array
    """[K] the values; NaN is a gap."""


@dataclass(frozen=True)
class Cell:
    """One metric of one arm."""

    values: dict[str, float]
    """The statistic by seed: NaN where a run does not count, infinite where the threshold was never reached."""
    estimate: Estimate
    """The mean of the finite values."""
    difference: Estimate | None
    """The mean difference to the first arm, over the seeds of both.

    None for the first arm, and where a run never reached the threshold.
    """


@dataclass(frozen=True)
class ComparisonTable:
    """Every metric of every arm, along one axis."""

    axis: str
    """A key of `AXES`."""
    labels: list[str]
    """The head of each metric's column."""
    cells: dict[str, list[Cell]]
    """By arm, a cell per metric."""


def curve(scalars: Scalars, name: str, axis: str) -> Curve | None:
    """Returns one scalar of a run along an axis; None if the run has not logged it."""
    if not scalars.get(name):
        return None
    steps, values = (np.array(column, dtype=float) for column in zip(*scalars[name], strict=True))
    # What each step adds to x: 1, unless the axis is summed.
    added = dict.fromkeys(range(int(steps[-1]) + 1), 1.0)
    if axis in SUMMED:
        if SUMMED[axis] not in scalars:
            raise ValueError(f"{SUMMED[axis]} has not been logged; it is needed for x")
        added = dict(scalars[SUMMED[axis]])
    elif axis == "update":  # not logged by a run with one update per step
        added |= dict(scalars.get("optim/updates", []))
    total = np.append(0.0, np.cumsum([*added.values()]))
    x = total[np.searchsorted([*added], steps, side="right")]
    return Curve(steps + 1, x, np.where(np.isfinite(values), values, np.nan))


def statistic(curve: Curve, metric: Metric, start: float, end: float) -> float:
    """Returns the metric's value for one run; `start` and `end` bound the x where all runs have been."""
    x, y = curve.x, curve.y
    if metric.is_threshold:
        is_reached = y >= metric.threshold if metric.statistic == ">=" else y <= metric.threshold
        return float(x[is_reached][0]) if is_reached.any() else math.inf
    if end < x[0]:  # the other runs had ended before this run's first value
        return math.nan
    if metric.statistic == "last" or end <= start:
        return float(np.interp(end, x, y))
    common_x = np.unique(np.concatenate([[start, end], x[(x > start) & (x < end)]]))
    return float(np.trapezoid(np.interp(common_x, x, y), common_x) / (end - start))


def curves(arms: Arms, name: str, axis: str) -> dict[str, dict[str, Curve]]:
    """Returns the curves of one scalar by arm and seed, of the runs that have logged it."""
    return {
        arm: {seed: seed_curve for seed, run in runs.items() if (seed_curve := curve(run, name, axis)) is not None}
        for arm, runs in arms.items()
    }


def compare(arms: Arms, metrics: Sequence[Metric], axis: str = "step") -> ComparisonTable:
    """Returns every metric of every arm; the differences are to the first arm."""
    table = ComparisonTable(axis, [], {arm: [] for arm in arms})
    for metric in metrics:
        # All runs have been between the latest first x and the earliest last x.
        curves_by_arm = curves(arms, metric.name, axis)
        all_x = [curve.x for by_seed in curves_by_arm.values() for curve in by_seed.values()]
        start = max((x[0] for x in all_x), default=math.nan)
        end = min((x[-1] for x in all_x), default=math.nan)
        table.labels.append(metric.label(axis, end))

        base: dict[str, float] = {}
        for arm, runs in arms.items():
            values = dict.fromkeys(runs, math.nan)
            values |= {seed: statistic(curve, metric, start, end) for seed, curve in curves_by_arm[arm].items()}
            difference = None
            if base and math.inf not in (*values.values(), *base.values()):
                difference = estimate([values[seed] - base[seed] for seed in values if seed in base])
            table.cells[arm].append(Cell(values, estimate(list(values.values())), difference))
            base = base or values
    return table


def shown(cell: Cell) -> str:
    """Returns the table's text for the value of an arm."""
    estimate = cell.estimate
    num_seeds = len(cell.values)
    if math.inf in cell.values.values():
        return f"{estimate.mean:.3g} ({estimate.n} of {num_seeds})" if estimate.n else f"never (0 of {num_seeds})"
    if estimate.n == 0:
        return "–"
    return with_interval(estimate) + ("" if estimate.n == num_seeds else f" (n = {estimate.n})")


def coarsened(curve: Curve, width: int) -> Curve:
    """Returns the curve with a point per `width` exploration steps, fewer at the end: the means of x and y."""
    bins = (curve.step - 1) // width
    starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
    x, y = (np.split(values, starts[1:]) for values in (curve.x, curve.y))
    finite_y = [values[np.isfinite(values)] for values in y]
    means = [values.mean() if len(values) else np.nan for values in finite_y]
    return Curve((bins[starts] + 1) * width, np.array([values.mean() for values in x]), np.array(means))


def means(curves: Sequence[Curve]) -> list[tuple[float, Estimate]]:
    """Returns mean x, and mean and interval of y, over several seeds at each exploration step. Gaps are left out."""
    points: dict[float, list[tuple[float, float]]] = {}
    for curve in curves:
        for step, x, y in zip(curve.step, curve.x, curve.y, strict=True):
            if np.isfinite(y):
                points.setdefault(step, []).append((x, y))
    columns = (zip(*points[step], strict=True) for step in sorted(points))
    return [(float(np.mean(x)), estimate(y)) for x, y in columns]
