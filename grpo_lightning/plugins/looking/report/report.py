"""`grpo report`: runs compared on one page of HTML that needs no network, no script and no other file.

    grpo report runs/quickstart                           one run
    grpo report runs/plain/0 runs/plain/1 runs/dapo/0     runs; those that differ in the seed alone are one arm
    grpo report runs/does_kl_matter -o kl.html            a folder of arms, which hold a folder per seed

The page shows the curves and the differences to the first arm given, with intervals over the seeds, what the
configurations differ in, and links to the pages of `grpo inspect` that lie in the runs' folders.
"""

import argparse
import difflib
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

from markupsafe import Markup

import grpo_lightning
from grpo_lightning.plugins.looking.inspector.inspector_page import PAGE as INSPECTOR
from grpo_lightning.plugins.looking.pages.markup import check_out, counted, filled, source_of, write_page
from grpo_lightning.plugins.looking.report import arm_comparison as comparison
from grpo_lightning.plugins.looking.report.arm_comparison import (
    AXES,
    ENOUGH,
    SUMMED,
    Curve,
    Metric,
    Table,
    with_interval,
)
from grpo_lightning.plugins.looking.report.arms import Arm, Run, arms_of, read_runs
from grpo_lightning.plugins.looking.report.charts import Point, Series, XAxis, chart, outside
from grpo_lightning.plugins.looking.run_files.run_configs import Config, differing, primary
from grpo_lightning.plugins.looking.run_files.run_graders import grader_of, measure, warning
from grpo_lightning.types import UsageError, require

PAGE = "report.html"
DEFAULTS = ("reward/mean", "rollout/length_mean", "policy/entropy", "policy/kl_ref", "time/step")

MOST_STEPS = 200  # a curve with more points is drawn with so many at most, each the mean of several steps
MANY_ROWS = 30
NUM_COLORS = 7  # colours in the style; further arms repeat them with dashes

HEADS = {"last": "last value", "mean": "mean of the curve"}
"""The columns' heads by statistic; that of a threshold is `reached after`."""

MEANINGS = {
    r"val/avg@\d+": "validation, sampled answers: {judged}",
    r"val/[\w-]+/avg@\d+": "a validation of its own, sampled answers",
    r"val/greedy": "validation, greedy answers: {judged}",
    r"reward/mean": "total reward, averaged over the completions of a step",
    r"rollout/length_mean": "tokens per completion",
    r"policy/entropy": "nats per token, at the sampling temperature",
    r"policy/kl_ref": "KL(π_θ ‖ π_ref), nats per token",
    r"time/step": "seconds per exploration step",
}
"""A line below the name; docs/metrics.md has more, and all metrics."""


@dataclass(frozen=True)
class Report:
    """Arms, what to show of them, and where the page will be."""

    title: str
    arms: list[Arm]  # the first is what the others are compared with
    metrics: list[Metric]
    axes: Sequence[str]
    folder: Path  # the page's; links are relative to it

    @property
    def runs(self) -> list[Run]:
        """The runs of all arms."""
        return [run for arm in self.arms for run in arm.runs.values()]

    @property
    def configs(self) -> list[Config]:
        """The configurations of the runs that have one."""
        return [run.config for run in self.runs if run.config is not None]

    def html(self) -> str:
        """The whole page."""
        style = filled("report.css", num_arms=len(self.arms), num_colors=NUM_COLORS)
        return filled(
            "report.html",
            report=self,
            source=source_of(style),
            style=style,
            made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by grpo_lightning {grpo_lightning.__version__}",
            parts=[self._axis(axis) for axis in self.axes],
            constants={"enough": ENOUGH, "num_colors": NUM_COLORS, "many_rows": MANY_ROWS},
            functions={"shown": comparison.shown, "interval": with_interval},
        )

    def notes(self) -> list[str]:
        """Facts that a reader should know before trusting the numbers."""
        runs, (base, *others) = self.runs, self.arms
        graders = {arm.name: grader_of(run.config or {}) for arm in self.arms for run in arm.runs.values()}
        found = [text] if (text := warning(graders)) else []
        few = ", ".join(arm.name for arm in self.arms if len(arm.runs) < ENOUGH)
        if few and len(runs) > 1:
            text = "No interval is drawn, and the seeds alone may make the difference"
            found.append(f"fewer than {ENOUGH} seeds: {few}. {text}")
        found += [f"{run.folder} {change}" for run in runs for change in run.changes]
        most, text = max(run.steps for run in runs), "last values and means compare up to there"
        found += [f"{run.folder} has {run.steps} of {most} steps: {text}" for run in runs if run.steps < most]
        for arm in self.arms:
            if keys := differing([run.config for run in arm.runs.values() if run.config is not None] or [{}]):
                found.append(f"the runs of {arm.name} differ in more than the seed: {', '.join(keys[:5])}")
        strange = [arm.name for arm in others if not arm.runs.keys() & base.runs.keys()]
        found += [f"{name} and {base.name} have no seed in common: no difference can be taken" for name in strange]
        return found

    def differences(self) -> list[tuple[str, bool, list[str]]]:
        """The keys that differ, whether each is due to another, and its values by arm."""
        keys = differing(self.configs or [{}]) if len(self.arms) > 1 else []
        own = primary(keys, self.configs)
        return [(key, key not in own, [arm.shown(key) for arm in self.arms]) for key in keys]

    def _axis(self, axis: str) -> dict[str, Any]:
        """The figures and the tables along an axis, and how many differences are tested and marked there."""
        arms = {arm.name: {seed: run.scalars for seed, run in arm.runs.items()} for arm in self.arms}
        found = {metric.name: comparison.curves(arms, metric.name, axis) for metric in self.metrics}
        ends = [x for by_arm in found.values() for runs in by_arm.values() for of in runs.values() for x in of.x]
        x_axis = XAxis(min(ends), max(ends), AXES[axis], axis in ("step", "update"))
        table = comparison.compare(arms, self.metrics, axis)
        differences = [cell.difference for cells in table.cells.values() for cell in cells]
        tested = [one for one in differences if one is not None and math.isfinite(one.half)]
        return {
            "over": AXES[axis],
            "figures": [self._figure(name, by_arm, x_axis) for name, by_arm in found.items()],
            "tested": len(tested),
            "marked": sum(one.excludes_zero for one in tested),
            "cells": table.cells,
            "blocks": [block for are in (False, True) if (block := self._block(table, are))[1]],
        }

    def _block(self, table: Table, are_thresholds: bool) -> tuple[list[str], list[tuple[str, str, dict[str, int]]]]:
        """The heads of a table; per row its name, how far it was counted, and by head the index of its metric."""
        rows: dict[tuple[str, str], dict[str, int]] = {}
        for index, metric in enumerate(self.metrics):
            if metric.is_threshold == are_thresholds:
                sign = {">=": f" ≥ {metric.threshold:g}", "<=": f" ≤ {metric.threshold:g}"}.get(metric.statistic, "")
                until = "" if sign else f"up to {table.labels[index].rpartition(' ')[2]} "
                head = HEADS.get(metric.statistic, "reached after")
                rows.setdefault((metric.name + sign, until), {})[head] = index
        heads = list(dict.fromkeys(head for of in rows.values() for head in of))
        return heads, [(name, until, of) for (name, until), of in rows.items()]

    def _figure(self, name: str, by_arm: Mapping[str, Mapping[str, Curve]], axis: XAxis) -> tuple[str, str, Markup]:
        """The name, the facts below it, and the chart, which is empty where no value is finite."""
        steps = [of.step for runs in by_arm.values() for of in runs.values()]
        is_long = any(len(of) > MOST_STEPS for of in steps)
        width = math.ceil(max(of[-1] for of in steps) / MOST_STEPS) if is_long else 1
        series = [
            series_of(i, arm, [comparison.coarsened(of, width) for of in runs.values()], axis.label)
            for i, (arm, runs) in enumerate(by_arm.items())
        ]
        lines = [metric.threshold for metric in self.metrics if metric.name == name and metric.is_threshold]
        meaning = next((text for pattern, text in MEANINGS.items() if re.fullmatch(pattern, name)), "")
        facts = [meaning.format(judged=measure(self.configs))]
        facts += [f"a point per {width} steps, their mean"] if width > 1 else []
        beside = re.sub(r"avg@\d+$", "ci95", name)
        halves = [run.scalars[beside][-1][1] for run in self.runs if beside != name and beside in run.scalars]
        facts += [f"± {max(halves):.3f} over questions at a run's end (95 %)"] if halves else []
        drawn = Markup()
        if any(any(one.points()) for one in series):
            drawn = chart(series, f"{name} over {axis.label}", axis, lines)
            if cut := outside(series, lines):
                ends = " and ".join(f"{end:.3g}" for end in dict.fromkeys((cut[0], cut[-1])))
                facts.append(f"{counted(len(cut), 'value')} outside: {ends}")
        return name, "; ".join(filter(None, facts)), drawn

    def link(self, run: Run) -> str:
        """The inspector's page of a run, from this one; empty where there is none."""
        page = run.folder / INSPECTOR
        return quote(os.fsencode(os.path.relpath(page.resolve(), self.folder))) if page.is_file() else ""


def series_of(number: int, name: str, found: Sequence[Curve], x_label: str) -> Series:
    """The lines and bands of one arm."""
    pieces = groupby(comparison.means(found), lambda point: point[1].n == len(found))
    whole = [[*piece] for has_all_seeds, piece in pieces if has_all_seeds]
    bands = [piece for piece in whole if len(piece) > 1 and len(found) >= ENOUGH]
    return Series(
        name,
        number,
        mean=[[(x, y.mean) for x, y in piece] for piece in whole],
        band=[[(x, y.mean - y.half, y.mean + y.half) for x, y in piece] for piece in bands],
        seeds=[_pieces(one) for one in found] if len(found) > 1 else [],
        labels={x: f"{name} · {x_label} {x:g} · {with_interval(y)}" for piece in whole for x, y in piece},
    )


def _pieces(of: Curve) -> list[list[Point]]:
    points = zip(of.x.tolist(), of.y.tolist(), strict=True)
    return [[*piece] for is_finite, piece in groupby(points, lambda point: math.isfinite(point[1])) if is_finite]


def metrics_of(texts: Sequence[str], logged: Sequence[str]) -> list[Metric]:
    """The metrics of a command line, or those shown by default; a name alone stands for the last value and the mean."""
    validated = [name for name in logged if re.fullmatch(r"val/(greedy|([\w-]+/)?avg@\d+)", name)]
    default = [*validated, *(name for name in DEFAULTS if name in logged)]
    require(bool(texts or default), f"none of the default metrics is there, but {', '.join(logged)}. Give --metrics")
    found: list[Metric] = []
    for text in texts or default:
        metric = Metric.parse(text)
        if metric.name not in logged:
            fit = ", ".join((difflib.get_close_matches(metric.name, logged, 5, cutoff=0.4) or logged)[:5])
            raise UsageError(f"--metrics {text}: no run has logged {metric.name}. Give a logged one, such as {fit}")
        found += [metric, Metric(metric.name, "mean")] if text == metric.name else [metric]
    return list(dict.fromkeys(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the page and prints where it is; returns the exit code."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "grpo report",
        description=f"{head.partition(': ')[2].capitalize()}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    folder = "a run's folder, or one that holds runs; the first is the base"
    add("runs", nargs="+", type=Path, metavar="RUN", help=folder)
    add("-o", "--out", type=Path, default=Path(PAGE), help=f"the page; {PAGE} by default")
    metrics = "scalars: name (last value and mean), name:last, name:mean, name>=number, name<=number"
    add("--metrics", nargs="+", default=[], help=metrics)
    add("--x", nargs="+", choices=AXES, default=["step"], help="a set of curves and a table for each")
    options = parser.parse_args(arguments)
    check_out(options.out, PAGE)
    arms = arms_of(read_runs(options.runs))
    runs = [run for arm in arms for run in arm.runs.values()]
    for axis in options.x:
        if without := [run.folder for run in runs if axis in SUMMED and SUMMED[axis] not in run.scalars]:
            raise UsageError(f"--x {axis}: {without[0]} has not logged {SUMMED[axis]}. Give --x step")
    logged = {name for run in runs for name in run.scalars} - {"epoch", "hp_metric"}
    title = Path(os.path.commonpath([run.resolve() for run in options.runs])).name or "Report"
    page = Report(title, arms, metrics_of(options.metrics, sorted(logged)), options.x, options.out.parent.resolve())
    write_page(options.out, page.html())
    counts = f"{counted(len(arms), 'configuration')}, {counted(len(runs), 'run')}"
    print(*(f"note: {note}" for note in page.notes()), f"{options.out}: {counts}. Open it in a browser.", sep="\n")
    return 0
