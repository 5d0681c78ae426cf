"""The table and the picture that `tools/run_experiment.py` writes: arms over their seeds, with intervals.

Shown are the mean over the seeds and the half-width of its 95 % interval (Student's t). The difference to the first
arm is taken seed by seed, so what the two arms share, such as the order of the questions, cancels. Its interval does
not know how many differences are looked at: of twenty without effect one is marked on average.

x is `step` (exploration steps done, so equal rollouts), `update`, `seconds` (sum of time/step: without validation) or
`tokens` (sum of rollout/tokens). The last value and the mean are taken where all runs of all arms have been: from the
latest first x to the earliest last x, of measured points alone. So with `seconds` the last value is the last one
before equal time.

A value that is not finite is a gap. A run whose statistic meets one does not count for it. The cell then shows n, the
number of seeds left, as it does where a run lacks the metric. Where not every run reaches a threshold, the cell is a
lower bound, the mean with the last x of those that did not, and how many did, without interval and difference.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plot_run import BLUE, GREEN, GREY, ORANGE

from grpo_lightning.plugins.looking.report.arm_comparison import (
    AXES,
    ENOUGH,
    Arms,
    Cell,
    ComparisonTable,
    Curve,
    Estimate,
    Metric,
    compare,
    curves,
    means,
    value_of,
    with_interval,
)
from grpo_lightning.plugins.looking.run_files.run_configs import flat, read_config
from grpo_lightning.plugins.looking.run_files.run_graders import grader_of, warning
from grpo_lightning.plugins.looking.run_files.run_scalars import read_scalars

Array = np.ndarray

COLORS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, as far as they show on white."""


def shown(cell: Cell) -> str:
    """Returns the text of an arm's value, with the number of seeds where it is not all of them."""
    n = cell.estimate.n
    num_seeds = len(cell.values)
    if math.isfinite(cell.at_least):
        return f"{value_of(cell)} ({n} of {num_seeds})"
    return value_of(cell) + (f" (n = {n})" if 0 < n < num_seeds else "")


def shown_difference(of: Estimate | None) -> str:
    """The table's text for a difference, marked where its interval excludes 0."""
    if of is None or of.n == 0:
        return "–"
    return f"**{with_interval(of, '+')}** \\*" if of.excludes_zero else with_interval(of, "+")


def markdown(table: ComparisonTable) -> str:
    """The table as Markdown, at most three metrics side by side, with a line on how to read it."""
    first, *others = table.cells
    lines = []
    for start in range(0, len(table.labels), 3):
        part = slice(start, start + 3)
        heads = ["arm", "seeds"]
        for label in table.labels[part]:
            heads += [label, f"vs. {first}"] if others else [label]
        lines += ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        for arm, cells in table.cells.items():
            row = [arm, str(len(cells[0].values))]
            for cell in cells[part]:
                row += [shown(cell), shown_difference(cell.difference)] if others else [shown(cell)]
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    legend = f"Mean over the seeds ± half the 95 % interval (Student's t), over {AXES[table.axis]}."
    if others:
        legend += f" “vs. {first}” is the difference seed by seed; \\* marks those whose interval excludes 0."
    if any(math.inf in cell.values.values() for cells in table.cells.values() for cell in cells):
        legend += " “≥ (k of n)”: only k of n runs reached the threshold; the others count with their last x."
    return "\n".join([*lines, legend, ""])


def band(curves: Sequence[Curve]) -> tuple[Array, Array, Array]:
    """Of several seeds at each exploration step: mean x, mean y, half-width; 0 where no interval is drawn."""
    points = means(curves)
    halves = [y.reach if y.n >= ENOUGH else 0.0 for _, y in points]
    return np.array([x for x, _ in points]), np.array([y.mean for _, y in points]), np.array(halves)


def draw(panel: Any, arms: Arms, name: str, axis: str) -> None:
    """One scalar of every arm: the mean over seeds as a line, its 95 % interval as a band; of two seeds both."""
    for number, (arm, of_arm) in enumerate(curves(arms, name, axis).items()):
        x, mean, half = band(list(of_arm.values()))
        color, dashes = COLORS[number % len(COLORS)], "-" if number < len(COLORS) else "--"
        panel.fill_between(x, mean - half, mean + half, color=color, alpha=0.12, linewidth=0)
        for one in of_arm.values() if 1 < len(of_arm) < ENOUGH else ():
            panel.plot(one.x, one.y, dashes, color=color, linewidth=0.8, alpha=0.5)
        marker = "o" if len(x) < 25 else ""
        panel.plot(x, mean, dashes, color=color, linewidth=1.8, marker=marker, markersize=3.5, label=arm)
    panel.set(xlabel=AXES[axis], ylabel=name)
    panel.xaxis.get_major_locator().set_params(integer=axis in ("step", "update"))
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
                raise ValueError(f"{run}: no scalars there")
    return arms


def write(folders: Mapping[str, Sequence[Path]], metrics: Sequence[Metric], axes: Sequence[str], out: Path) -> str:
    """Writes out.md and out.png; returns the former's text, a table per axis.

    Raises:
        ValueError: No run has logged a metric, or lacks what an axis is made of.
    """
    arms = read_arms(folders)
    for metric in metrics:
        if not any(metric.name in run for runs in arms.values() for run in runs.values()):
            known = sorted({name for runs in arms.values() for run in runs.values() for name in run})
            raise ValueError(f"no run has logged {metric.name}; logged are {', '.join(known)}")
    text = "\n".join(markdown(compare(arms, metrics, axis)) for axis in axes)
    graders = {arm: grader_of(flat(read_config(runs[0] / "config.yaml") or {})) for arm, runs in folders.items()}
    text += f"\n{note.capitalize()}.\n" if (note := warning(graders)) else ""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.md").write_text(text, encoding="utf-8")
    plot(arms, metrics, axes, out.with_name(f"{out.name}.png"))
    return text
