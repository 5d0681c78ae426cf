"""The page of `grpo report`: one HTML text, without scripts, that nothing from outside can change or slow."""

import base64
import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import grpo_lightning
from grpo_lightning.plugins.inspect.arms import Arm, Config, Run, differing, primary
from grpo_lightning.plugins.inspect.charts import Point, Series, XAxis, chart, outside
from grpo_lightning.plugins.inspect.comparison import AXES, Arms, Curve, Metric, coarsened, compare, curves, means
from grpo_lightning.plugins.inspect.estimates import ENOUGH, with_interval
from grpo_lightning.plugins.inspect.judges import judge_of, measure, warning
from grpo_lightning.plugins.inspect.markup import NUM_COLORS, counted, escaped, swatch
from grpo_lightning.plugins.inspect.results import Results

STYLE = (Path(__file__).with_name("report.css")).read_text(encoding="utf-8")
MOST_STEPS = 200
"""A curve with more points is drawn with so many at most, each the mean of several steps."""
MANY_ROWS = 30
"""A longer table of differences is folded."""

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
    def configs(self) -> list[Config]:
        """The configurations of the runs that have one."""
        return [run.config for arm in self.arms for run in arm.runs.values() if run.config is not None]

    def html(self) -> str:
        """The whole page."""
        style = STYLE + "".join(self._colors())
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        return "\n".join(
            [
                '<!doctype html><html lang="en"><head><meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="referrer" content="no-referrer">',
                f"<title>{escaped(self.title)}</title>",
                f"<style>{style}</style></head><body>",
                *self._head(),
                *self._differences(),
                *(part for axis in self.axes for part in self._axis(axis)),
                *self._runs(),
                *self._reading(),
                "</body></html>\n",
            ]
        )

    def notes(self) -> list[str]:
        """What a reader should know before trusting the numbers."""
        found = []
        runs = [run for arm in self.arms for run in arm.runs.values()]
        judges = {arm.name: judge_of(run.config or {}) for arm in self.arms for run in arm.runs.values()}
        found += [warning(judges)] if warning(judges) else []
        few = [arm.name for arm in self.arms if len(arm.runs) < ENOUGH]
        if few and len(runs) > 1:
            found.append(
                f"fewer than {ENOUGH} seeds: {', '.join(few)}. No interval is drawn, and the seeds alone may make the "
                "difference"
            )
        found += [f"{run.folder} {change}" for run in runs for change in run.changes]
        steps = {run.folder: _steps(run) for run in runs}
        most = max(steps.values())
        for folder, count in steps.items():
            if count < most:
                found.append(f"{folder} has {count} of {most} steps: last values and means compare up to there")
        for arm in self.arms:
            keys = differing([run.config for run in arm.runs.values() if run.config is not None] or [{}])
            if keys:
                found.append(f"the runs of {arm.name} differ in more than the seed: {', '.join(keys[:5])}")
        base, *others = self.arms
        for arm in others:
            if not arm.runs.keys() & base.runs.keys():
                found.append(f"{arm.name} and {base.name} have no seed in common: no difference can be taken")
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
        num_runs = sum(len(arm.runs) for arm in self.arms)
        made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        counts = f"{counted(len(self.arms), 'configuration')} · {counted(num_runs, 'run')}"
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
            cells = []
            for arm in self.arms:
                kind = "" if arm.shown(key) == self.arms[0].shown(key) else ' class="other"'
                cells.append(f"<td{kind}><bdi>{escaped(arm.shown(key))}</bdi></td>")
            kind = "" if key in own else ' class="due"'
            rows.append(f'<tr{kind}><th scope="row"><code>{escaped(key)}</code></th>{"".join(cells)}</tr>')
        heads = "".join(self._arm_head(number) for number in range(len(self.arms)))
        table = (
            f'<div class="wide"><table class="keys"><thead><tr><th scope="col">key</th>{heads}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )
        yield "<section><h2>What differs</h2>"
        if len(rows) > MANY_ROWS:
            table = f"<details><summary>{len(rows)} keys</summary>{table}</details>"
        yield f"{table}</section>"

    def _arm_head(self, number: int) -> str:
        return f'<th scope="col">{swatch(number)}<bdi>{escaped(self.arms[number].name)}</bdi></th>'

    def _axis(self, axis: str) -> Iterator[str]:
        over = f" over {AXES[axis]}" if len(self.axes) > 1 else ""
        yield f'<section><h2>Curves{over}</h2><div class="charts">'
        names = dict.fromkeys(metric.name for metric in self.metrics)
        found = {name: curves(self.scalars, name, axis) for name in names}
        ends = [x for by_arm in found.values() for runs in by_arm.values() for of in runs.values() for x in of.x]
        x_axis = XAxis(min(ends), max(ends), AXES[axis], axis in ("step", "update"))
        for name, by_arm in found.items():
            yield self._figure(name, by_arm, x_axis)
        yield f"</div></section><section><h2>Numbers{over}</h2>"
        yield from Results(compare(self.scalars, self.metrics, axis), self.metrics).html()
        yield "</section>"

    def _figure(self, name: str, by_arm: Mapping[str, Mapping[str, Curve]], axis: XAxis) -> str:
        width = bin_width([of for runs in by_arm.values() for of in runs.values()])
        drawn_curves = [[coarsened(of, width) if width > 1 else of for of in runs.values()] for runs in by_arm.values()]
        series = [series_of(i, arm, drawn_curves[i], axis.label) for i, arm in enumerate(by_arm)]
        lines = [metric.threshold for metric in self.metrics if metric.name == name and metric.is_threshold]
        meaning = next((text for pattern, text in MEANINGS.items() if re.fullmatch(pattern, name)), "")
        meaning = meaning.format(judged=measure(self.configs))
        if width > 1:
            meaning += f"{'; ' if meaning else ''}a point per {width} steps, their mean"
        drawn = "<p>No value is finite.</p>"
        if any(True for one in series for _ in one.points()):
            drawn = chart(series, f"{name} over {axis.label}", axis, lines)
            if cut := outside(series, lines):
                ends = " and ".join(f"{end:.3g}" for end in dict.fromkeys((cut[0], cut[-1])))
                meaning += f"{'; ' if meaning else ''}{counted(len(cut), 'value')} outside: {ends}"
        return (
            f"<figure><figcaption><strong>{escaped(name)}</strong> <span>{escaped(meaning)}</span></figcaption>"
            f"{drawn}</figure>"
        )

    def _runs(self) -> Iterator[str]:
        yield "<section><h2>Runs</h2>"
        yield '<div class="wide"><table class="runs"><thead><tr>'
        heads = ("arm", "seed", "steps", "time", "tokens sampled", "folder", "inspector")
        yield "".join(f'<th scope="col">{head}</th>' for head in heads) + "</tr></thead><tbody>"
        for number, arm in enumerate(self.arms):
            for seed, run in arm.runs.items():
                yield (
                    f'<tr><th scope="row">{swatch(number)}<bdi>{escaped(arm.name)}</bdi></th>'
                    f"<td>{escaped(seed)}</td><td>{_steps(run)}</td><td>{_duration(_sum(run, 'time/step'))}</td>"
                    f"<td>{_sum(run, 'rollout/tokens'):,.0f}</td>"
                    f"<td><bdi><code>{escaped(run.folder)}</code></bdi></td><td>{self._link(run)}</td></tr>"
                )
        yield "</tbody></table></div></section>"

    def _link(self, run: Run) -> str:
        if run.inspector is None:
            return "–"
        path = os.path.relpath(run.inspector.resolve(), self.folder)
        return f'<a href="{escaped(quote(os.fsencode(path)))}" rel="noreferrer">open</a>'

    def _reading(self) -> Iterator[str]:
        yield "<section class=reading><h2>How to read it</h2>"
        for text in reading(self.arms, self.axes):
            yield f"<p>{text}</p>"
        yield "</section>"


def reading(arms: Sequence[Arm], axes: Sequence[str]) -> Iterator[str]:
    """Sentences on how to read what the page has."""
    if any(len(arm.runs) > 1 for arm in arms):
        yield (
            "A strong line is the mean over an arm's seeds, drawn where all of them have a value; a thin one is a "
            f"seed. The band is the 95 % interval of the mean (Student's t), from {ENOUGH} seeds on. With two seeds "
            "it would be 12.7 standard errors wide to each side. A band may go on beyond its panel."
        )
    if len(arms) > 1:
        yield (
            "“±” is half the 95 % interval. A difference is taken seed by seed, so what two arms share, such as the "
            "order of the questions, cancels. It is marked where its interval excludes 0. From "
            f"{ENOUGH} seeds on, dots beside it are the seeds, the line is its interval, the grey line is 0."
        )
        yield (
            "Intervals do not know how many differences you look at: of twenty without effect one is marked on "
            "average. Decide before looking which one counts, or repeat a surprising one with new seeds."
        )
    yield (
        "Last value and mean are taken where all runs have been, so arms of different length compare. The mean is the "
        "curve's area by its width: it also tells how soon a value was reached."
    )
    if "seconds" in axes:
        yield "Seconds are those of training, without validation. They compare on the same, equally busy machine alone."
    yield "A value that is not finite is a gap. Under the pointer a point, or a number, shows what it is made of."


def series_of(number: int, name: str, found: Sequence[Curve], x_label: str) -> Series:
    """What is drawn of one arm.

    Args:
        number: The arm's.
        name: The arm's.
        found: The curves of its seeds.
        x_label: What x counts.
    """
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
    """How many steps a point of these curves stands for; 1 where they are short."""
    if max((len(of.step) for of in found), default=0) <= MOST_STEPS:
        return 1
    return math.ceil(max(of.step[-1] for of in found) / MOST_STEPS)


def _pieces(of: Curve) -> list[list[Point]]:
    pieces: list[list[Point]] = [[]]
    for x, y in zip(of.x, of.y, strict=True):
        if math.isfinite(y):
            pieces[-1].append((float(x), float(y)))
        else:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _steps(run: Run) -> int:
    return 1 + max(points[-1][0] for points in run.scalars.values())


def _sum(run: Run, name: str) -> float:
    return math.fsum(value for _, value in run.scalars.get(name, []) if math.isfinite(value))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
