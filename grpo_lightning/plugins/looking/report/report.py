"""Runs compared on one page of HTML that needs no network, no script and no other file."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpo_lightning
from grpo_lightning.plugins.looking.inspector.inspector_page import PAGE as INSPECTOR
from grpo_lightning.plugins.looking.pages.markup import counted, filled, source_of
from grpo_lightning.plugins.looking.report import arm_comparison as comparison
from grpo_lightning.plugins.looking.report.arm_comparison import (
    AXES,
    ENOUGH,
    Arms,
    Curve,
    Metric,
    with_interval,
)
from grpo_lightning.plugins.looking.report.arms import Arm, ReportedRun, compare_arms, reservations
from grpo_lightning.plugins.looking.report.charts import CurveFigure, Point, Series, XAxis, outside
from grpo_lightning.plugins.looking.report.report_tables import ReportTable, tables_of
from grpo_lightning.plugins.looking.run_files.run_configs import Config, differing, primary
from grpo_lightning.plugins.looking.run_files.run_graders import grader_of, measure, warning

MOST_STEPS = 200
"""The most points of a curve; a longer curve has means of several steps."""
MANY_ROWS = 30
"""From more differing keys than these on, their table is folded."""
NUM_COLORS = 7
"""Colours in the style; further arms repeat them with dashes."""

MEANINGS = {
    r"val/avg@\d+": "validation, sampled answers: {measure}",
    r"val/[\w-]+/avg@\d+": "a validation of its own, sampled answers",
    r"val/greedy": "validation, greedy answers: {measure}",
    r"reward/mean": "total reward, averaged over the completions of a step",
    r"rollout/length_mean": "tokens per completion",
    r"policy/entropy": "nats per token, at the sampling temperature",
    r"policy/kl_ref": "KL(π_θ ‖ π_ref), nats per token",
    r"time/step": "seconds per exploration step",
}
"""A line below the name; docs/reference/metrics.md has more, and all metrics."""


@dataclass(frozen=True)
class Report:
    """Arms, what to show of them, and where the page will be."""

    title: str
    """The head of the page."""
    arms: list[Arm]
    """The arms; the others are compared with the first."""
    metrics: list[Metric]
    """The columns of the tables."""
    axes: Sequence[str]
    """Keys of `AXES`, each for a set of curves and a table."""
    folder: Path
    """The folder of the page, which links are relative to."""

    @property
    def runs(self) -> list[ReportedRun]:
        """The runs of all arms."""
        return [run for arm in self.arms for run in arm.runs.values()]

    @property
    def configs(self) -> list[Config]:
        """The configurations of the runs that have one."""
        return [run.config for run in self.runs if run.config is not None]

    def html(self) -> str:
        """Returns the page."""
        style = filled("report.css", num_arms=len(self.arms), num_colors=NUM_COLORS)
        return filled(
            "report.html",
            report=self,
            source=source_of(style),
            style=style,
            made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by grpo_lightning {grpo_lightning.__version__}",
            axes=[self._axis(axis) for axis in self.axes],
            constants={"enough": ENOUGH, "num_colors": NUM_COLORS, "many_rows": MANY_ROWS},
        )

    def notes(self) -> list[str]:
        """Returns facts that a reader should know before trusting the numbers, a text each."""
        runs = self.runs
        base, *compared_arms = self.arms
        graders = {arm.name: grader_of(run.config or {}) for arm in self.arms for run in arm.runs.values()}
        notes = [text] if (text := warning(graders)) else []
        few = ", ".join(arm.name for arm in self.arms if len(arm.runs) < ENOUGH)
        if few and len(runs) > 1:
            notes.append(
                f"fewer than {ENOUGH} seeds: {few}. No band is drawn, no difference marked: seeds alone may make it"
            )
        notes += [f"{run.folder} {change}" for run in runs for change in run.changes]
        num_steps = max(run.steps for run in runs)
        notes += [
            f"{run.folder} has {run.steps} of {num_steps} steps: last values and means compare up to there"
            for run in runs
            if run.steps < num_steps
        ]
        for arm in self.arms:
            if keys := differing([run.config for run in arm.runs.values() if run.config is not None] or [{}]):
                notes.append(f"the runs of {arm.name} differ in more than the seed: {', '.join(keys[:5])}")
        notes += [
            f"{arm.name} and {base.name} have no seed in common: no difference can be taken"
            for arm in compared_arms
            if not arm.runs.keys() & base.runs.keys()
        ]
        return notes + reservations(
            self.arms, self.metrics, [compare_arms(self.arms, self.metrics, axis) for axis in self.axes]
        )

    def differences(self) -> list[tuple[str, bool, list[str]]]:
        """Returns the keys that differ, whether each is due to another, and its values by arm."""
        keys = differing(self.configs or [{}]) if len(self.arms) > 1 else []
        primary_keys = primary(keys, self.configs)
        return [(key, key not in primary_keys, [arm.shown(key) for arm in self.arms]) for key in keys]

    @property
    def scalars(self) -> Arms:
        """The curves of the runs, by arm and seed."""
        return {arm.name: {seed: run.scalars for seed, run in arm.runs.items()} for arm in self.arms}

    def figures(self, axis: str) -> list[CurveFigure]:
        """Returns a figure per scalar along an axis, a key of `AXES`."""
        curves = {metric.name: comparison.curves(self.scalars, metric.name, axis) for metric in self.metrics}
        all_x = [
            x
            for by_arm in curves.values()
            for by_seed in by_arm.values()
            for curve in by_seed.values()
            for x in curve.x
        ]
        x_axis = XAxis(min(all_x), max(all_x), AXES[axis], axis in ("step", "update"))
        return [self._figure(name, by_arm, x_axis) for name, by_arm in curves.items()]

    def tables(self) -> list[ReportTable]:
        """Returns the tables along all axes."""
        by_axis = (compare_arms(self.arms, self.metrics, axis) for axis in self.axes)
        return [table for compared in by_axis for table in tables_of(compared, self.metrics)]

    def _axis(self, axis: str) -> dict[str, Any]:
        """Returns the figures and the tables along an axis, and how many differences are tested and marked there."""
        table = compare_arms(self.arms, self.metrics, axis)
        differences = [cell.difference for cells in table.cells.values() for cell in cells]
        tested = [
            difference
            for difference in differences
            if difference and difference.n >= ENOUGH and math.isfinite(difference.half)
        ]
        return {
            "over": AXES[axis],
            "figures": self.figures(axis),
            "tested": len(tested),
            "marked": sum(difference.excludes_zero for difference in tested),
            "tables": tables_of(table, self.metrics),
        }

    def _figure(self, name: str, by_arm: Mapping[str, Mapping[str, Curve]], axis: XAxis) -> CurveFigure:
        """Returns the lines of a scalar; a long curve has means of several steps."""
        steps = [curve.step for by_seed in by_arm.values() for curve in by_seed.values()]
        is_long = any(len(curve_steps) > MOST_STEPS for curve_steps in steps)
        width = math.ceil(max(curve_steps[-1] for curve_steps in steps) / MOST_STEPS) if is_long else 1
        series = [
            series_of(i, arm, {seed: comparison.coarsened(curve, width) for seed, curve in by_seed.items()}, axis.label)
            for i, (arm, by_seed) in enumerate(by_arm.items())
        ]
        lines = [metric.threshold for metric in self.metrics if metric.name == name and metric.is_threshold]
        meaning = next((text for pattern, text in MEANINGS.items() if re.fullmatch(pattern, name)), "")
        facts = [meaning.format(measure=measure(self.configs))]
        if width > 1:
            facts.append(f"a point per {width} steps, their mean")
        interval_name = re.sub(r"avg@\d+$", "ci95", name)
        if interval_name != name:
            runs = [run for run in self.runs if interval_name in run.scalars]
            widest = max(
                ((run.scalars[interval_name][-1][1], run.num_questions(name)) for run in runs), default=(0, "")
            )
            facts += [f"± {widest[0]:.3f} over {widest[1]}questions at a run's end (95 %)"] if widest[0] > 0 else []
        figure = CurveFigure(name, axis, series, lines, facts)
        if not figure.is_empty and (cut := outside(series, lines)):
            ends = " and ".join(f"{end:.3g}" for end in dict.fromkeys((cut[0], cut[-1])))
            facts.append(f"{counted(len(cut), 'value')} outside: {ends}")
        return figure

    def link(self, run: ReportedRun) -> str:
        """Returns the inspector's page of a run, relative to this page; empty if there is none."""
        page = run.folder / INSPECTOR
        return quote(os.fsencode(os.path.relpath(page.resolve(), self.folder))) if page.is_file() else ""


def series_of(number: int, name: str, curve_by_seed: Mapping[str, Curve], x_label: str) -> Series:
    """Returns the lines and bands of one arm from a curve per seed."""
    curves = [*curve_by_seed.values()]
    # The mean is drawn where all seeds have a value.
    pieces = groupby(comparison.means(curves), lambda point: point[1].n == len(curves))
    complete = [[*piece] for has_all_seeds, piece in pieces if has_all_seeds]
    bands = [piece for piece in complete if len(piece) > 1 and len(curves) >= ENOUGH]
    return Series(
        name,
        number,
        mean=[[(x, y.mean) for x, y in piece] for piece in complete],
        band=[[(x, y.mean - y.reach, y.mean + y.reach) for x, y in piece] for piece in bands],
        seeds={seed: _pieces(curve) for seed, curve in curve_by_seed.items()},
        labels={
            x: f"{name} · {x_label} {x:g} · {with_interval(y)} ({counted(y.n, 'seed')})"
            for piece in complete
            for x, y in piece
        },
    )


def _pieces(curve: Curve) -> list[list[Point]]:
    points = zip(curve.x.tolist(), curve.y.tolist(), strict=True)
    return [[*piece] for is_finite, piece in groupby(points, lambda point: math.isfinite(point[1])) if is_finite]
