"""The page of `grpo report`: one HTML text, without scripts, that nothing from outside can change or slow."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

import grpo_lightning
from grpo_lightning.plugins.inspect.arms import Arm, Run
from grpo_lightning.plugins.inspect.charts import Point, Series, XAxis, chart, outside
from grpo_lightning.plugins.inspect.comparison import (
    AXES,
    ENOUGH,
    Arms,
    Curve,
    Metric,
    coarsened,
    compare,
    curves,
    means,
    with_interval,
)
from grpo_lightning.plugins.inspect.configs import Config, differing, primary
from grpo_lightning.plugins.inspect.judges import judge_of, measure, warning
from grpo_lightning.plugins.inspect.markup import NUM_COLORS, counted, escaped, filled, source_of, swatch, table
from grpo_lightning.plugins.inspect.page import PAGE as INSPECTOR
from grpo_lightning.plugins.inspect.results import results

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
MOST_STEPS = 200
"""A curve with more points is drawn with so many at most, each the mean of several steps."""
MANY_ROWS = 30

MEANINGS = {
    r"val/avg@\d+": "validation, sampled answers: {judged}",
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
    arms: list[Arm]
    """The first is what the others are compared with."""
    metrics: list[Metric]
    axes: Sequence[str]
    folder: Path
    """The page's; links are relative to it."""

    @property
    def scalars(self) -> Arms:
        """The curves by arm and seed."""
        return {arm.name: {seed: run.scalars for seed, run in arm.runs.items()} for arm in self.arms}

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
        style = STYLE + "".join(self._colors())
        axes = (part for axis in self.axes for part in self._axis(axis))
        body = "\n".join([*self._head(), *self._differences(), *axes, *self._runs()])
        parts = {"source": source_of(style), "title": escaped(self.title), "style": style, "body": body}
        return filled("report.html", parts | {"enough": str(ENOUGH)})

    def notes(self) -> list[str]:
        """Facts that a reader should know before trusting the numbers."""
        runs = self.runs
        base, *others = self.arms
        judges = {arm.name: judge_of(run.config or {}) for arm in self.arms for run in arm.runs.values()}
        found = [text] if (text := warning(judges)) else []
        few = [arm.name for arm in self.arms if len(arm.runs) < ENOUGH]
        if few and len(runs) > 1:
            text = "No interval is drawn, and the seeds alone may make the difference"
            found.append(f"fewer than {ENOUGH} seeds: {', '.join(few)}. {text}")
        found += [f"{run.folder} {change}" for run in runs for change in run.changes]
        most = max(map(_steps, runs))
        shorter = [run for run in runs if _steps(run) < most]
        text = "last values and means compare up to there"
        found += [f"{run.folder} has {_steps(run)} of {most} steps: {text}" for run in shorter]
        for arm in self.arms:
            if keys := differing([run.config for run in arm.runs.values() if run.config is not None] or [{}]):
                found.append(f"the runs of {arm.name} differ in more than the seed: {', '.join(keys[:5])}")
        strange = [arm.name for arm in others if not arm.runs.keys() & base.runs.keys()]
        found += [f"{name} and {base.name} have no seed in common: no difference can be taken" for name in strange]
        without = [str(run.folder) for run in runs if run.config is None]
        if without and len(runs) > 1:
            found.append(f"without config.yaml: {', '.join(without[:5])}{' ...' if len(without) > 5 else ''}")
        return found

    def _colors(self) -> Iterator[str]:
        for number in range(len(self.arms)):
            yield f".a{number}{{color:var(--c{number % NUM_COLORS})}}"
            if number >= NUM_COLORS:
                dashes = "6 4" if number < 2 * NUM_COLORS else "2 4"
                yield f".a{number} .mean,.key{number} .mean{{stroke-dasharray:{dashes}}}"
            yield f":root:has(#show{number}:not(:checked)) svg .a{number}{{display:none}}"

    def _head(self) -> Iterator[str]:
        made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        counts = f"{counted(len(self.arms), 'configuration')} · {counted(len(self.runs), 'run')}"
        yield f"<header><h1><bdi>{escaped(self.title)}</bdi></h1>"
        yield f"<p>{counts} · made {made} by grpo_lightning {escaped(grpo_lightning.__version__)}</p></header>"
        if notes := self.notes():
            yield '<ul class="notes">' + "".join(f"<li>{escaped(note)}</li>" for note in notes) + "</ul>"
        if len(self.arms) > 1:
            yield '<nav class="legend" aria-label="Configurations: those that are ticked are drawn">'
            for number, arm in enumerate(self.arms):
                yield (
                    f'<label><input type="checkbox" id="show{number}" checked>{swatch(number)}'
                    f"<bdi>{escaped(arm.name)}</bdi> <small>{counted(len(arm.runs), 'seed')}</small></label>"
                )
            yield "</nav>"

    def _differences(self) -> Iterator[str]:
        configs = self.configs
        keys = differing(configs) if configs else []
        if len(self.arms) < 2 or not keys:
            return
        own = set(primary(keys, configs))
        rows = []
        for key in keys:
            first, *_ = values = [arm.shown(key) for arm in self.arms]
            kinds = ("" if value == first else ' class="other"' for value in values)
            cells = (f"<td{kind}><bdi>{escaped(value)}</bdi></td>" for kind, value in zip(kinds, values, strict=True))
            due = "" if key in own else ' class="due"'
            rows.append(f'<tr{due}><th scope="row"><code>{escaped(key)}</code></th>{"".join(cells)}</tr>')
        arms = (f"{swatch(number)}<bdi>{escaped(arm.name)}</bdi>" for number, arm in enumerate(self.arms))
        found = table("keys", ["key", *arms], rows)
        if len(rows) > MANY_ROWS:
            found = f"<details><summary>{len(rows)} keys</summary>{found}</details>"
        yield f"<section><h2>What differs</h2>\n{found}</section>"

    def _axis(self, axis: str) -> Iterator[str]:
        over = f" over {AXES[axis]}" if len(self.axes) > 1 else ""
        yield f'<section><h2>Curves{over}</h2><div class="charts">'
        found = {metric.name: curves(self.scalars, metric.name, axis) for metric in self.metrics}
        ends = [x for by_arm in found.values() for runs in by_arm.values() for of in runs.values() for x in of.x]
        x_axis = XAxis(min(ends), max(ends), AXES[axis], axis in ("step", "update"))
        for name, by_arm in found.items():
            yield self._figure(name, by_arm, x_axis)
        yield f"</div></section><section><h2>Numbers{over}</h2>"
        yield from results(compare(self.scalars, self.metrics, axis), self.metrics)
        yield "</section>"

    def _figure(self, name: str, by_arm: Mapping[str, Mapping[str, Curve]], axis: XAxis) -> str:
        width = bin_width([of for runs in by_arm.values() for of in runs.values()])
        series = [
            series_of(i, arm, [coarsened(of, width) if width > 1 else of for of in runs.values()], axis.label)
            for i, (arm, runs) in enumerate(by_arm.items())
        ]
        lines = [metric.threshold for metric in self.metrics if metric.name == name and metric.is_threshold]
        meaning = next((text for pattern, text in MEANINGS.items() if re.fullmatch(pattern, name)), "")
        facts = [meaning.format(judged=measure(self.configs))]
        facts += [f"a point per {width} steps, their mean"] if width > 1 else []
        drawn = "<p>No value is finite.</p>"
        if any(any(one.points()) for one in series):
            drawn = chart(series, f"{name} over {axis.label}", axis, lines)
            if cut := outside(series, lines):
                ends = " and ".join(f"{end:.3g}" for end in dict.fromkeys((cut[0], cut[-1])))
                facts.append(f"{counted(len(cut), 'value')} outside: {ends}")
        caption = f"<strong>{escaped(name)}</strong> <span>{escaped('; '.join(filter(None, facts)))}</span>"
        return f"<figure><figcaption>{caption}</figcaption>{drawn}</figure>"

    def _runs(self) -> Iterator[str]:
        rows = [
            f'<tr><th scope="row">{swatch(number)}<bdi>{escaped(arm.name)}</bdi></th>'
            f"<td>{escaped(seed)}</td><td>{_steps(run)}</td><td>{timedelta(seconds=round(_sum(run, 'time/step')))}</td>"
            f"<td>{_sum(run, 'rollout/tokens'):,.0f}</td>"
            f"<td><bdi><code>{escaped(run.folder)}</code></bdi></td><td>{self._link(run)}</td></tr>"
            for number, arm in enumerate(self.arms)
            for seed, run in arm.runs.items()
        ]
        heads = ("arm", "seed", "steps", "time", "tokens sampled", "folder", "inspector")
        yield f"<section><h2>Runs</h2>\n{table('runs', heads, rows)}</section>"

    def _link(self, run: Run) -> str:
        page = run.folder / INSPECTOR
        if not page.is_file():
            return "–"
        path = os.path.relpath(page.resolve(), self.folder)
        return f'<a href="{escaped(quote(os.fsencode(path)))}" rel="noreferrer">open</a>'


def series_of(number: int, name: str, found: Sequence[Curve], x_label: str) -> Series:
    """The lines and bands of one arm."""
    mean: list[list[Point]] = [[]]
    band: list[list[tuple[float, float, float]]] = [[]]
    labels = {}
    for x, y in means(found):
        if y.n < len(found):
            mean, band = [*mean, []], [*band, []]
            continue
        mean[-1].append((x, y.mean))
        if y.n >= ENOUGH:
            band[-1].append((x, y.mean - y.half, y.mean + y.half))
        labels[x] = f"{name} · {x_label} {x:g} · {with_interval(y)}"
    seeds = [_pieces(one) for one in found] if len(found) > 1 else []
    return Series(name, number, [p for p in mean if p], [p for p in band if len(p) > 1], seeds, labels)


def bin_width(found: Sequence[Curve]) -> int:
    """The number of steps that a point of these curves stands for; 1 where they are short."""
    is_long = max((len(of.step) for of in found), default=0) > MOST_STEPS
    return math.ceil(max(of.step[-1] for of in found) / MOST_STEPS) if is_long else 1


def _pieces(of: Curve) -> list[list[Point]]:
    points = zip(of.x.tolist(), of.y.tolist(), strict=True)
    return [[*piece] for is_finite, piece in groupby(points, lambda point: math.isfinite(point[1])) if is_finite]


def _steps(run: Run) -> int:
    return 1 + max(points[-1][0] for points in run.scalars.values())


def _sum(run: Run, name: str) -> float:
    return math.fsum(value for _, value in run.scalars.get(name, []) if math.isfinite(value))
