"""The arms of an experiment compared over their seeds: curves, statistics of curves, differences seed by seed.

Last values and means are taken where all runs of all arms have been, from the latest first x to the earliest last x,
and only of points that were measured. A value that is not finite is a gap; a run whose statistic meets one does not
count for it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from grpo_lightning.maths.metrics import clustered_half_width, half_width
from grpo_lightning.plugins.looking.report.paired_difference import paired_half_width, unpaired_half_width
from grpo_lightning.plugins.looking.run_files.run_scalars import Scalars
from grpo_lightning.plugins.looking.run_files.run_validations import ValuesByQuestion
from grpo_lightning.types import UsageError

Arms = dict[str, dict[str, Scalars]]
Array = np.ndarray
Questions = Mapping[str, Mapping[str, Mapping[str, ValuesByQuestion]]]
"""The values of each question by arm, seed and scalar."""

AXES = {
    "step": "exploration steps",
    "update": "optimizer updates",
    "seconds": "seconds of training",
    "tokens": "sampled tokens",
}
SUMMED = {"seconds": "time/step", "tokens": "rollout/tokens"}
"""The scalar, logged once per exploration step, whose sum so far is x: time is without validation."""

ENOUGH = 3
"""Seeds from which on a band is drawn and a difference marked: with two seeds t is 12.7."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval."""

    mean: float
    """The mean of the finite values; NaN without any."""
    half: float
    """Half the width of the 95 % interval; NaN if there is none: below two seeds, or if all values are equal."""
    n: int
    """Seeds with a finite value."""
    num_questions: int = 0
    """Questions that every seed answered, if the interval takes account of them; otherwise 0."""
    unpaired_half: float = math.nan
    """Half the interval without pairing; NaN if questions are not paired."""

    @property
    def reach(self) -> float:
        """What a band reaches to each side: `half`, and 0 without an interval."""
        return self.half if math.isfinite(self.half) else 0.0

    @property
    def excludes_zero(self) -> bool:
        """True if 0 lies outside the interval of at least `ENOUGH` seeds."""
        return self.n >= ENOUGH and abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Returns mean and 95 % interval, t * s / √n, of the values that are finite."""
    finite = [value for value in values if math.isfinite(value)]
    mean = float(np.mean(finite)) if finite else math.nan
    squares = sum((value - mean) ** 2 for value in finite)
    return Estimate(mean, _positive(half_width(len(finite), 0.0, squares), mean), len(finite))


def _positive(half: float, mean: float) -> float:
    """Returns half the interval, or NaN if it is nothing but rounding: equal values tell nothing about others."""
    return half if half > 1e-9 * abs(mean) else math.nan


def rounded(value: float, sign: str = "") -> str:
    """Returns three significant digits, and from 1000 on all digits before the point: no column mixes in `3.12e+04`."""
    return f"{value:{sign}.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:{sign}.3g}"


def with_interval(estimate: Estimate, sign: str = "") -> str:
    """Returns mean ± half, with two digits of the half; three or four significant digits without an interval."""
    mean = estimate.mean
    half = estimate.half
    if not math.isfinite(half):
        return rounded(mean, sign)
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
    """`last`, `last3` for the mean of the last three points (or any number), `mean` for the area under the curve by its
    width, or `>=` and `<=` for the x where the threshold is reached first."""
    threshold: float = math.nan
    """The threshold of `>=` and `<=`."""

    @classmethod
    def parse(cls, text: str) -> "Metric":
        """Reads `name`, `name:last`, `name:last3`, `name:mean`, `name>=number` or `name<=number`."""
        form = re.fullmatch(r"([^:<>=\s]+)\s*(?::(last(?:[1-9]\d*)?|mean)|(>=|<=)\s*(\S+))?", text)
        with suppress(ValueError):  # the threshold is no number
            if form is not None:
                name, statistic, sign, number = form.groups()
                return cls(name, sign, float(number)) if sign else cls(name, statistic or "last")
        raise UsageError(f"metric {text!r}: give a scalar's name, or name:mean, name:last3, name>=number, name<=number")

    @property
    def is_threshold(self) -> bool:
        """True if the statistic is the x where a threshold is reached."""
        return self.statistic in (">=", "<=")

    @property
    def num_points(self) -> int:
        """Points at the end of the curve that `last` and `last3` average."""
        return int(self.statistic.removeprefix("last") or 1)

    def label(self, axis: str, end: float) -> str:
        """Returns the head of the metric's column; `end` is the last x where all runs have been."""
        if self.is_threshold:
            return f"{AXES[axis]} to {self.name} {'≥' if self.statistic == '>=' else '≤'} {self.threshold:g}"
        if self.statistic == "mean":
            return f"{self.name}, mean to {end:.4g}"
        return f"{self.name} at {end:.4g}" if self.num_points == 1 else f"{self.name}, {self.statistic} at {end:.4g}"


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
    """The mean difference to the base, over the seeds of both; None for the base, and where none can be taken."""
    steps: Sequence[int] = ()
    """Exploration steps done at the last point that the statistic is made of, rising, without repetitions."""
    at_least: float = math.nan
    """For a threshold that some runs never reached: the mean x, where those runs count with their last x."""
    reason: str = ""
    """Why there is no difference to the base; empty if there is one."""


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


@dataclass(frozen=True)
class Measured:
    """One metric of one run."""

    value: float
    """The statistic: NaN where the run does not count, infinite where the threshold was never reached."""
    last_x: float
    """The x of the curve's last point."""
    step: int | None = None
    """Exploration steps done at the last point that the statistic is made of; None for thresholds."""
    by_question: Array | None = None
    """[Q] the statistic of each question; None if the values of the questions are not there."""


def measured(curve: Curve, metric: Metric, start: float, end: float, questions: ValuesByQuestion | None) -> Measured:
    """Returns the metric of one run.

    Args:
        curve: The scalar.
        metric: The statistic.
        start: The first x where all runs have been.
        end: The last x where all runs have been.
        questions: The values of the scalar for each question.
    """
    x, y = curve.x, curve.y
    if metric.is_threshold:
        is_reached = y >= metric.threshold if metric.statistic == ">=" else y <= metric.threshold
        return Measured(float(x[is_reached][0]) if is_reached.any() else math.inf, float(x[-1]))
    points = np.flatnonzero((x >= start) & (x <= end) if metric.statistic == "mean" else x <= end)
    if metric.statistic != "mean":
        points = points[-metric.num_points :] if len(points) >= metric.num_points else points[:0]
    if not len(points):
        return Measured(math.nan, float(x[-1]))
    steps = [int(step) for step in curve.step[points]]
    by_question = None
    if questions and all(step - 1 in questions.by_step for step in steps):
        by_question = _summary(x[points], np.array([questions.by_step[step - 1] for step in steps]), metric)
    return Measured(float(_summary(x[points], y[points], metric)), float(x[-1]), steps[-1], by_question)


def _summary(x: Array, y: Array, metric: Metric) -> Array:
    """Returns the statistic of each column of y, [K] or [K, Q]."""
    if metric.statistic == "mean" and x[-1] > x[0]:
        return np.asarray(np.trapezoid(y, x, axis=0) / (x[-1] - x[0]))
    return np.asarray(y.mean(axis=0))


def curves(arms: Arms, name: str, axis: str) -> dict[str, dict[str, Curve]]:
    """Returns the curves of one scalar by arm and seed, of the runs that have logged it."""
    return {
        arm: {seed: seed_curve for seed, run in runs.items() if (seed_curve := curve(run, name, axis)) is not None}
        for arm, runs in arms.items()
    }


def compare(
    arms: Arms,
    metrics: Sequence[Metric],
    axis: str = "step",
    questions: Questions | None = None,
    obstacle: Callable[[str, str], str] = lambda arm, name: "",
) -> ComparisonTable:
    """Returns every metric of every arm, and the differences to the first arm, the base.

    Args:
        arms: The scalars by arm and seed.
        metrics: The statistics.
        axis: A key of `AXES`.
        questions: The values of each question, if the runs have left them; differences then pair questions too.
        obstacle: Returns why a scalar of an arm does not compare with the base's, from the names of the arm and the
            scalar; empty if it does.
    """
    base = next(iter(arms))
    questions = questions or {}
    table = ComparisonTable(axis, [], {arm: [] for arm in arms})
    for metric in metrics:
        # All runs have been between the latest first x and the earliest last x.
        name = metric.name
        curves_by_arm = curves(arms, name, axis)
        all_x = [curve.x for by_seed in curves_by_arm.values() for curve in by_seed.values()]
        start = max((x[0] for x in all_x), default=math.nan)
        end = min((x[-1] for x in all_x), default=math.nan)
        table.labels.append(metric.label(axis, end))

        runs_of = {
            arm: {
                seed: measured(curve, metric, start, end, questions.get(arm, {}).get(seed, {}).get(name))
                for seed, curve in by_seed.items()
            }
            for arm, by_seed in curves_by_arm.items()
        }
        for arm in arms:
            difference = None
            reason = ""
            if arm != base:
                reason = obstacle(arm, name) or _mismatch(questions.get(arm, {}), questions.get(base, {}), name)
                if not reason:
                    is_crossed = len({_questions_of(run, name) for run in questions.get(arm, {}).values()}) == 1
                    difference, reason = _difference(runs_of[arm], runs_of[base], is_crossed)
            values = {seed: runs_of[arm][seed].value if seed in runs_of[arm] else math.nan for seed in arms[arm]}
            last_steps = {run.step for run in runs_of[arm].values() if run.step is not None}
            bounds = [min(run.value, run.last_x) for run in runs_of[arm].values()]
            at_least = float(np.mean(bounds)) if math.inf in values.values() else math.nan
            arm_estimate = _over_questions([*runs_of[arm].values()]) or estimate([*values.values()])
            table.cells[arm].append(Cell(values, arm_estimate, difference, sorted(last_steps), at_least, reason))
    return table


def _over_questions(runs: Sequence[Measured]) -> Estimate | None:
    """Returns the mean of a single run with its interval over the questions; None if there is no such interval."""
    if len(runs) != 1 or runs[0].by_question is None:
        return None
    finite = runs[0].by_question[np.isfinite(runs[0].by_question)]
    if len(finite) < 2:
        return None
    half = _positive(clustered_half_width(finite.tolist()), runs[0].value)
    return Estimate(runs[0].value, half, 1, len(finite))


def _difference(
    runs: Mapping[str, Measured], base_runs: Mapping[str, Measured], is_crossed: bool
) -> tuple[Estimate | None, str]:
    """Returns the mean difference of two arms by seed, and by question if they can be paired; or why there is none."""
    if not runs or not base_runs:
        return None, "not logged by both"
    pairs = [(run, base_runs[seed]) for seed, run in runs.items() if seed in base_runs]
    if not pairs:
        return None, "no seed in common"
    if any(math.isinf(run.value) for run in (*runs.values(), *base_runs.values())):
        return None, "not all reached it"
    pairs = [pair for pair in pairs if all(math.isfinite(run.value) for run in pair)]
    if not pairs:
        return None, "nothing measured up to there"
    by_seed = estimate([run.value - base_run.value for run, base_run in pairs])
    tables = [[run.by_question for run in arm_runs] for arm_runs in zip(*pairs, strict=True)]
    if len(pairs) < 2 or not is_crossed or any(values is None for table in tables for values in table):
        return by_seed, ""
    values, base = np.array(tables)
    is_graded = np.isfinite(values).all(axis=0) & np.isfinite(base).all(axis=0)
    values = values[:, is_graded]
    base = base[:, is_graded]
    if is_graded.sum() < 2:
        return by_seed, ""
    mean = float((values - base).mean())
    half = _positive(paired_half_width(values, base), mean)
    return Estimate(mean, half, len(pairs), int(is_graded.sum()), unpaired_half_width(values, base)), ""


def _questions_of(run: Mapping[str, ValuesByQuestion], name: str) -> str:
    """Returns the hash of the questions that a scalar of a validation is made of; empty if it is not known."""
    prefix = name.rpartition("/")[0]
    same_set = (values.questions for other_name, values in run.items() if other_name.rpartition("/")[0] == prefix)
    return next(same_set, "")


def _mismatch(
    runs: Mapping[str, Mapping[str, ValuesByQuestion]],
    base_runs: Mapping[str, Mapping[str, ValuesByQuestion]],
    name: str,
) -> str:
    """Returns the reason if the runs of a seed answered other questions, or were graded otherwise; else nothing."""
    for seed in runs.keys() & base_runs.keys():
        run, base_run = runs[seed], base_runs[seed]
        questions = _questions_of(run, name)
        base_questions = _questions_of(base_run, name)
        if questions and base_questions and questions != base_questions:
            return "other questions"
        if name in run and name in base_run and run[name].grader != base_run[name].grader:
            return "another grader"
    return ""


def value_of(cell: Cell) -> str:
    """Returns the text of an arm's value; `≥` where runs count that never reached a threshold."""
    if math.isfinite(cell.at_least):
        return f"≥ {rounded(cell.at_least)}"
    return with_interval(cell.estimate) if cell.estimate.n else "–"


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
