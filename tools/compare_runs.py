"""Compares the arms of an experiment over their seeds: a table with intervals, and a picture.

python tools/compare_runs.py runs/does_kl_matter --metrics val/avg@8 val/avg@8:mean "val/avg@8>=0.9" --out results

The folder holds a folder per arm, which holds a folder per seed with the run's event files. The others are compared
with the first arm, in the order of `--arms`. A metric is a scalar's name and what to take of its curve:

    val/avg@8         the last value
    val/avg@8:mean    the mean over the curve (its area by its width)
    val/avg@8>=0.9    the first x at which that is reached; <= as well

Shown are the mean over the seeds and the half-width of its 95 % interval (Student's t). The difference to the first
arm is taken seed by seed, so what the two arms share, such as the order of the questions, cancels. Its interval does
not know how many differences are looked at: of twenty without effect one is marked on average.

x is `step` (exploration steps done, so equal rollouts), `update`, `seconds` (sum of time/step: without validation) or
`tokens` (sum of rollout/tokens). The last value and the mean are taken where all runs of all arms have been: from the
latest first x to the earliest last x, with straight lines between the points. So with `--x seconds` the last value is
the one at equal time. Several updates in one exploration step count as one point, their mean at the last of them.

A value that is not finite is a gap. A run whose statistic meets one does not count for it. The cell then shows n, the
number of seeds left, as it does where a run lacks the metric. Where not every run reaches a threshold, the cell is
the mean of those that did and how many they were, without interval and difference.
"""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from plot_run import BLUE, GREEN, GREY, ORANGE

from grpo_lightning.inspect.scalars import Scalars, read_scalars

Arms = dict[str, dict[str, Scalars]]
"""The scalars of every run, by arm and by seed."""
Array = np.ndarray

AXES = {
    "step": "exploration steps",
    "update": "optimizer updates",
    "seconds": "seconds of training",
    "tokens": "sampled tokens",
}
SUMMED = {"seconds": "time/step", "tokens": "rollout/tokens"}
"""The scalar, logged once per exploration step, whose sum so far is x."""
COLORS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, as far as they show on white."""
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class Metric:
    """A scalar and the statistic of its curve."""

    name: str
    statistic: str = "last"
    """`last`, `mean`, `>=` or `<=`."""
    threshold: float = math.nan
    """Of `>=` and `<=`."""

    @classmethod
    def parse(cls, text: str) -> "Metric":
        """`name`, `name:last`, `name:mean`, `name>=number` or `name<=number`.

        Raises:
            ValueError: It is none of these.
        """
        form = re.fullmatch(r"(?P<name>[^:<>=\s]+)\s*(:(?P<of>last|mean)|(?P<sign>>=|<=)\s*(?P<number>\S+))?", text)
        if form is None:
            raise ValueError(f"metric {text!r}: give a scalar's name, or name:mean, name>=number, name<=number")
        if form["sign"] is None:
            return cls(form["name"], form["of"] or "last")
        try:
            return cls(form["name"], form["sign"], float(form["number"]))
        except ValueError:
            raise ValueError(f"metric {text!r}: {form['number']!r} is not a number") from None

    @property
    def is_threshold(self) -> bool:
        """Whether the statistic is where a threshold is reached."""
        return self.statistic in (">=", "<=")

    def label(self, axis: str, end: float) -> str:
        """The head of the metric's column; `end` is the last x where all runs have been."""
        if self.is_threshold:
            return f"{AXES[axis]} to {self.name} {'≥' if self.statistic == '>=' else '≤'} {self.threshold:g}"
        return f"{self.name} at {end:.4g}" if self.statistic == "last" else f"{self.name}, mean to {end:.4g}"


@dataclass(frozen=True)
class Curve:
    """One scalar of one run, a point per exploration step; K points."""

    step: Array
    """[K] exploration steps done, rising."""
    x: Array
    """[K] the axis: steps, updates, seconds or tokens so far."""
    y: Array
    """[K] the values; NaN is a gap."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval."""

    mean: float
    half: float
    """Half the width of the 95 % interval; NaN where there is none: below two seeds."""
    n: int
    """Seeds that count."""

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval."""
        return abs(self.mean) > self.half


@dataclass(frozen=True)
class Cell:
    """One metric of one arm."""

    values: dict[str, float]
    """The statistic by seed: NaN where a run does not count, infinite where the threshold was never reached."""
    estimate: Estimate
    """Over the seeds whose value is finite."""
    difference: Estimate | None
    """To the first arm, over the seeds of both; None for the first arm and where a run never reached the threshold."""


@dataclass(frozen=True)
class Table:
    """Every metric of every arm, along one axis."""

    axis: str
    labels: list[str]
    """The heads of the metrics' columns."""
    cells: dict[str, list[Cell]]
    """By arm, in the order of the metrics."""


def t_quantile(df: int) -> float:
    """Student's t at 97.5 %; above 30 degrees of freedom by Cornish and Fisher's expansion, off by less than 1e-4."""
    assert df >= 1
    if df <= len(T_975):
        return T_975[df - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval, t * s / √n, of the values that are finite."""
    finite = [value for value in values if math.isfinite(value)]
    n = len(finite)
    if n < 2:
        return Estimate(finite[0] if finite else math.nan, math.nan, n)
    return Estimate(float(np.mean(finite)), t_quantile(n - 1) * float(np.std(finite, ddof=1)) / n**0.5, n)


def curve(scalars: Scalars, name: str, axis: str) -> Curve | None:
    """One scalar of a run along an axis; None if the run has not logged it.

    Raises:
        ValueError: The run lacks what the axis is made of.
    """
    points = scalars.get(name) or (updates_made(scalars) if name == "optim/updates" else None)
    if not points:
        return None
    updates, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    # Lightning writes `epoch`, the exploration step counted from 0, beside everything; -1 is before the first.
    steps = at("epoch", scalars, updates) + 1
    x = {"step": steps, "update": updates + 1}.get(axis)
    if x is None:
        x = at(SUMMED[axis], scalars, updates, summed=True)
    ends = np.append(np.flatnonzero(np.diff(steps)), len(steps) - 1)
    starts = np.append(0, ends[:-1] + 1)
    means = [values[start : end + 1].mean() for start, end in zip(starts, ends, strict=True)]
    return Curve(steps[ends], x[ends], np.where(np.isfinite(means), means, np.nan))


def updates_made(scalars: Scalars) -> list[tuple[int, float]]:
    """The updates of each step, at its last one, of a run without a stop rule, which does not log them."""
    rates = [update for update, _ in scalars.get("optim/lr", [])]
    steps = at("epoch", scalars, np.array(rates, dtype=float)).tolist() if rates else []
    last = dict(zip(steps, rates, strict=True))
    return [(update, float(steps.count(step))) for step, update in last.items()]


def at(name: str, scalars: Scalars, updates: Array, summed: bool = False) -> Array:
    """A scalar, or its sum so far, as it stood at each of the updates."""
    if not scalars.get(name):
        raise ValueError(f"{name} has not been logged; it is needed for x")
    logged, values = (np.array(column, dtype=float) for column in zip(*scalars[name], strict=True))
    index = np.searchsorted(logged, updates, side="right")
    if summed:
        return np.append(0.0, np.cumsum(values))[index]
    return values[np.maximum(index - 1, 0)]


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
    found: dict[str, dict[str, Curve]] = {arm: {} for arm in arms}
    for arm, runs in arms.items():
        for seed, run in runs.items():
            if (one := curve(run, name, axis)) is not None:
                found[arm][seed] = one
    return found


def difference(values: Mapping[str, float], first: Mapping[str, float]) -> Estimate | None:
    """The paired difference to the first arm; None where a run never reached its threshold."""
    if math.inf in values.values() or math.inf in first.values():
        return None
    return estimate([values[seed] - first[seed] for seed in values if seed in first])


def compare(arms: Arms, metrics: Sequence[Metric], axis: str = "step") -> Table:
    """Every metric of every arm; the differences are to the first."""
    table = Table(axis, [], {arm: [] for arm in arms})
    for metric in metrics:
        found = curves(arms, metric.name, axis)
        present = [one for by_seed in found.values() for one in by_seed.values()]
        start = max((one.x[0] for one in present), default=math.nan)
        end = min((one.x[-1] for one in present), default=math.nan)
        table.labels.append(metric.label(axis, end))
        first: dict[str, float] | None = None
        for arm, runs in arms.items():
            values = dict.fromkeys(runs, math.nan)
            values |= {seed: statistic(one, metric, start, end) for seed, one in found[arm].items()}
            paired = None if first is None else difference(values, first)
            table.cells[arm].append(Cell(values, estimate(list(values.values())), paired))
            first = first or values
    return table


def with_interval(of: Estimate, sign: str = "") -> str:
    """Mean ± half, with two digits of the half; three significant digits where there is no half, or it is 0."""
    if not math.isfinite(of.half):
        return f"{of.mean:{sign}.3g}"
    if of.half <= 1e-9 * abs(of.mean):
        return f"{of.mean:{sign}.4g} ± 0"
    decimals = min(6, max(0, 1 - math.floor(math.log10(of.half))))
    return f"{of.mean:{sign}.{decimals}f} ± {of.half:.{decimals}f}"


def shown(cell: Cell) -> str:
    """The table's text for an arm's own value."""
    of, seeds = cell.estimate, len(cell.values)
    if math.inf in cell.values.values():
        return f"{of.mean:.3g} ({of.n} of {seeds})" if of.n else f"never (0 of {seeds})"
    if of.n == 0:
        return "–"
    return with_interval(of) if of.n == seeds else f"{with_interval(of)} (n = {of.n})"


def shown_difference(of: Estimate | None) -> str:
    """The table's text for a difference, marked where its interval excludes 0."""
    if of is None or of.n == 0:
        return "–"
    return f"**{with_interval(of, '+')}** \\*" if of.excludes_zero else with_interval(of, "+")


def markdown(table: Table) -> str:
    """The table as Markdown, at most three metrics side by side, with a line on how to read it."""
    first, *others = table.cells
    lines = []
    for start in range(0, len(table.labels), 3):
        part = slice(start, start + 3)
        heads = ["arm", "seeds"]
        for label in table.labels[part]:
            heads += [label, f"less {first}"] if others else [label]
        lines += ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        for arm, cells in table.cells.items():
            row = [arm, str(len(cells[0].values))]
            for cell in cells[part]:
                row += [shown(cell), shown_difference(cell.difference)] if others else [shown(cell)]
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    legend = f"Mean over the seeds ± half the 95 % interval (Student's t), over {AXES[table.axis]}."
    if others:
        legend += f" “less {first}” is the difference seed by seed; \\* marks those whose interval excludes 0."
    if any(math.inf in cell.values.values() for cells in table.cells.values() for cell in cells):
        legend += " “(k of n)”: only k of n runs reached the threshold; the number is their mean."
    return "\n".join([*lines, legend, ""])


def band(curves: Sequence[Curve]) -> tuple[Array, Array, Array]:
    """Of several seeds at each exploration step: mean x, mean y, half-width (0 below two seeds); gaps left out."""
    points: dict[float, list[tuple[float, float]]] = {}
    for one in curves:
        for step, x, y in zip(one.step, one.x, one.y, strict=True):
            if np.isfinite(y):
                points.setdefault(step, []).append((x, y))
    xs = [np.mean([x for x, _ in points[step]]) for step in sorted(points)]
    ys = [estimate([y for _, y in points[step]]) for step in sorted(points)]
    return np.array(xs), np.array([y.mean for y in ys]), np.nan_to_num([y.half for y in ys])


def draw(panel: Any, arms: Arms, name: str, axis: str) -> None:
    """One scalar of every arm: the mean over seeds as a line, its 95 % interval as a band."""
    for number, (arm, of_arm) in enumerate(curves(arms, name, axis).items()):
        x, mean, half = band(list(of_arm.values()))
        color, dashes = COLORS[number % len(COLORS)], "-" if number < len(COLORS) else "--"
        panel.fill_between(x, mean - half, mean + half, color=color, alpha=0.12, linewidth=0)
        marker = "o" if len(x) < 25 else ""
        panel.plot(x, mean, dashes, color=color, linewidth=1.8, marker=marker, markersize=3.5, label=arm)
    panel.set(xlabel=AXES[axis], ylabel=name)
    panel.spines[["top", "right"]].set_visible(False)


def plot(arms: Arms, metrics: Sequence[Metric], axes: Sequence[str], out: Path) -> None:
    """A panel per scalar and axis, at most three side by side; thresholds dotted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(metric.name for metric in metrics))
    rows = math.ceil(len(names) / 3)
    columns = math.ceil(len(names) / rows)
    width = (6.0, 9.0, 11.0)[columns - 1]
    figure = Figure(figsize=(width, 3.2 * rows * len(axes) + 0.5), dpi=100, layout="constrained")
    grid = figure.subplots(rows * len(axes), columns, squeeze=False)
    for axis, block in zip(axes, grid.reshape(len(axes), -1), strict=True):
        for name, panel in zip(names, block, strict=False):
            draw(panel, arms, name, axis)
            for metric in metrics:
                if metric.name == name and metric.is_threshold:
                    panel.axhline(metric.threshold, color=GREY, linestyle=":", linewidth=1.2, zorder=0)
        for panel in block[len(names) :]:
            panel.axis("off")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    side_by_side = max(1, int(width * 11 / (max(map(len, labels)) + 6)))
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(arms), side_by_side), frameon=False)
    FigureCanvasAgg(figure).print_png(out)


def read_arms(folders: Mapping[str, Sequence[Path]]) -> Arms:
    """Reads every run; the folder's name is the seed.

    Raises:
        ValueError: An arm has no run, or a run has no scalars.
    """
    arms: Arms = {}
    for arm, runs in folders.items():
        arms[arm] = {run.name: read_scalars(run) for run in runs}
        if not arms[arm]:
            raise ValueError(f"arm {arm!r} has no run")
        for run in runs:
            if not arms[arm][run.name]:
                raise ValueError(f"{run}: no scalars in an event file there")
    return arms


def find_runs(root: Path, names: Sequence[str] | None = None) -> dict[str, list[Path]]:
    """The runs' folders by arm, from the layout root/arm/seed; seeds in the order of their numbers.

    Raises:
        ValueError: There is none, or an arm that is named is not there.
    """
    found: dict[str, list[Path]] = {}
    for run in sorted({file.parent for file in root.glob("*/*/events.out.tfevents.*")}):
        found.setdefault(run.parent.name, []).append(run)
    missing = [name for name in names or [] if name not in found]
    if not found or missing:
        raise ValueError(
            f"{root}: no runs at {', '.join(missing) or 'arm/seed'}; there are {', '.join(found) or 'none'}"
        )
    return {name: sorted(found[name], key=lambda run: (len(run.name), run.name)) for name in names or found}


def write(arms: Arms, metrics: Sequence[Metric], axes: Sequence[str], out: Path) -> str:
    """Writes out.md and out.png; returns the former's text, a table per axis.

    Raises:
        ValueError: No run has logged a metric, or lacks what an axis is made of.
    """
    for metric in metrics:
        if not any(metric.name in run for runs in arms.values() for run in runs.values()):
            known = sorted({name for runs in arms.values() for run in runs.values() for name in run})
            raise ValueError(f"no run has logged {metric.name}; logged are {', '.join(known)}")
    text = "\n".join(markdown(compare(arms, metrics, axis)) for axis in axes)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.md").write_text(text, encoding="utf-8")
    plot(arms, metrics, axes, out.with_name(f"{out.name}.png"))
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compares the arms of an experiment over their seeds.")
    parser.add_argument("root", type=Path, help="folder with a folder an arm, with a folder a seed")
    parser.add_argument("--metrics", nargs="+", required=True, help="name, name:mean, name>=number, name<=number")
    parser.add_argument("--x", nargs="+", choices=AXES, default=["step"], help="a table and a row of panels for each")
    parser.add_argument("--arms", nargs="+", help="arms in this order, the one to compare with first; all by default")
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.md and OUT.png")
    options = parser.parse_args(arguments)
    try:
        metrics = [Metric.parse(text) for text in options.metrics]
        print(write(read_arms(find_runs(options.root, options.arms)), metrics, options.x, options.out))
    except ValueError as error:
        sys.exit(f"compare_runs: {error}")


if __name__ == "__main__":
    main()
