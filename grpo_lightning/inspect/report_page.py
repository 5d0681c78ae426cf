"""The page of `grpo report`: one HTML text, without scripts, that nothing from outside can change or slow."""

import base64
import hashlib
import html
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpo_lightning
from grpo_lightning.inspect.arms import Arm, Run, differing, primary, shown
from grpo_lightning.inspect.charts import Point, Series, chart, strip
from grpo_lightning.inspect.comparison import AXES, Arms, Cell, Curve, Metric, Table, compare, curves, means
from grpo_lightning.inspect.comparison import shown as shown_cell
from grpo_lightning.inspect.estimates import ENOUGH, with_interval

STYLE = (Path(__file__).with_name("report.css")).read_text(encoding="utf-8")
NUM_COLORS = 7
"""Colours in the style; further arms repeat them with dashes."""
MANY_ROWS = 30
"""A longer table of differences is folded."""

MEANINGS = {
    r"val/avg@\d+": "fraction right of the sampled answers in validation",
    r"val/pass@1": "fraction of validation questions whose greedy answer is right",
    r"reward/mean": "total reward, averaged over the completions of a step",
    r"rollout/length_mean": "tokens per completion",
    r"policy/entropy": "nats per token, at the sampling temperature",
    r"policy/kl_ref": "KL(π_θ ‖ π_ref), nats per token",
    r"time/step": "seconds per exploration step",
}
"""A line below the name; docs/metrics.md has more, and all metrics."""


def escaped(text: Any) -> str:
    """Text for a page. What no page may hold, such as control characters, becomes a replacement character."""
    clean = str(text).encode("utf-8", "replace").decode("utf-8")
    return html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", clean))


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
        few = [arm.name for arm in self.arms if len(arm.runs) < ENOUGH]
        if few and len(runs) > 1:
            found.append(
                f"fewer than {ENOUGH} seeds: {', '.join(few)}. No interval is drawn, and nothing can be concluded "
                "from one seed"
            )
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
        if without := [str(run.folder) for run in runs if run.config is None]:
            found.append(f"without config.yaml: {', '.join(without[:5])}{' ...' if len(without) > 5 else ''}")
        return found

    def _colors(self) -> Iterator[str]:
        for number in range(len(self.arms)):
            yield f".a{number}{{color:var(--c{number % NUM_COLORS})}}"
            if number >= NUM_COLORS:
                yield f".a{number} .mean{{stroke-dasharray:{'6 4' if number < 2 * NUM_COLORS else '2 3'}}}"
            yield f":root:has(#show{number}:not(:checked)) svg .a{number}{{display:none}}"

    def _head(self) -> Iterator[str]:
        num_runs = sum(len(arm.runs) for arm in self.arms)
        made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        counts = f"{_counted(len(self.arms), 'configuration')} · {_counted(num_runs, 'run')}"
        yield f"<header><h1><bdi>{escaped(self.title)}</bdi></h1>"
        yield f"<p>{counts} · made {made} by grpo_lightning {escaped(grpo_lightning.__version__)}</p></header>"
        if notes := self.notes():
            yield '<ul class="notes">' + "".join(f"<li>{escaped(note)}</li>" for note in notes) + "</ul>"
        if len(self.arms) > 1:
            yield '<nav class="legend" aria-label="Configurations: those that are ticked are drawn">'
            for number, arm in enumerate(self.arms):
                yield (
                    f'<label><input type="checkbox" id="show{number}" checked>{self._swatch(number)}'
                    f"<bdi>{escaped(arm.name)}</bdi> <small>{_counted(len(arm.runs), 'seed')}</small></label>"
                )
            yield "</nav>"

    def _swatch(self, number: int) -> str:
        return (
            f'<svg class="swatch" viewBox="0 0 22 10" aria-hidden="true"><g class="key{number} k{number % NUM_COLORS}">'
            '<line class="mean" x1="1" x2="21" y1="5" y2="5"/><circle class="dot" cx="11" cy="5" r="3"/></g></svg>'
        )

    def _differences(self) -> Iterator[str]:
        configs = [run.config for arm in self.arms for run in arm.runs.values() if run.config is not None]
        keys = differing(configs) if configs else []
        if len(self.arms) < 2 or not keys:
            return
        own = set(primary(keys, configs))
        rows = []
        for key in keys:
            cells = []
            for arm in self.arms:
                text = " / ".join("–" if value is None else shown(value) for value in arm.values(key))
                is_base = arm.values(key) == self.arms[0].values(key)
                cells.append(f"<td{'' if is_base else ' class=other'}><bdi>{escaped(text)}</bdi></td>")
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
        return f'<th scope="col">{self._swatch(number)}<bdi>{escaped(self.arms[number].name)}</bdi></th>'

    def _axis(self, axis: str) -> Iterator[str]:
        over = f" over {AXES[axis]}" if len(self.axes) > 1 else ""
        yield f"<section><h2>Curves{over}</h2><div class=charts>"
        for name in dict.fromkeys(metric.name for metric in self.metrics):
            yield self._figure(name, axis)
        yield f"</div></section><section><h2>Numbers{over}</h2>"
        table = compare(self.scalars, self.metrics, axis)
        yield from self._summary(table)
        for is_threshold in (False, True):
            if any(metric.is_threshold == is_threshold for metric in self.metrics):
                yield from self._numbers(table, is_threshold)
        yield "</section>"

    def _figure(self, name: str, axis: str) -> str:
        found = curves(self.scalars, name, axis)
        series = [
            series_of(number, arm, list(found[arm].values()), AXES[axis])
            for number, arm in enumerate(found)
            if found[arm]
        ]
        lines = [metric.threshold for metric in self.metrics if metric.name == name and metric.is_threshold]
        meaning = next((text for pattern, text in MEANINGS.items() if re.fullmatch(pattern, name)), "")
        drawn = chart(series, f"{name} over {AXES[axis]}", AXES[axis], axis in ("step", "update"), lines)
        return (
            f"<figure><figcaption><strong>{escaped(name)}</strong> <span>{escaped(meaning)}</span></figcaption>"
            f"{drawn or '<p>no finite value</p>'}</figure>"
        )

    def _summary(self, table: Table) -> Iterator[str]:
        """How many differences there are, and how many are marked."""
        found = [cell.difference for cells in table.cells.values() for cell in cells]
        tested = [one for one in found if one is not None and math.isfinite(one.half)]
        if tested:
            marked = sum(one.excludes_zero for one in tested)
            yield (
                f"<p>{_counted(len(tested), 'difference')} to <bdi>{escaped(self.arms[0].name)}</bdi> with an "
                f"interval: <strong>{marked}</strong> of them without 0 in it, marked <mark>so</mark>. "
                f"Were all arms equal, about {0.05 * len(tested):.2g} would be marked by chance.</p>"
            )

    def _numbers(self, table: Table, is_threshold: bool) -> Iterator[str]:
        chosen = [(i, m) for i, m in enumerate(self.metrics) if m.is_threshold == is_threshold]
        kinds = list(dict.fromkeys(_kind(metric) for _, metric in chosen))
        heads = '<th scope="col">arm</th><th scope="col">seeds</th>'
        less = f"less <bdi>{escaped(self.arms[0].name)}</bdi>"
        for kind in kinds:
            heads += f'<th scope="col">{kind}</th>'
            heads += f'<th scope="col" colspan="2">{less}</th>' if len(self.arms) > 1 else ""
        yield f'<div class="wide"><table class="numbers"><thead><tr>{heads}</tr></thead>'
        span = 2 + len(kinds) * (3 if len(self.arms) > 1 else 1)
        for name in dict.fromkeys(_row(metric) for _, metric in chosen):
            of = {_kind(metric): index for index, metric in chosen if _row(metric) == name}
            end = table.labels[next(iter(of.values()))].rpartition(" ")[2]
            until = "" if is_threshold else f" <small>to {AXES[table.axis]} {escaped(end)}</small>"
            yield f'<tbody><tr class="metric"><th scope="rowgroup" colspan="{span}">{escaped(name)}{until}</th></tr>'
            extents = {
                kind: _extent([cells[i] for cells in table.cells.values()], self._base(table, i))
                for kind, i in of.items()
            }
            for number, (arm, cells) in enumerate(table.cells.items()):
                row = f'<th scope="row">{self._swatch(number)}<bdi>{escaped(arm)}</bdi></th>'
                row += f"<td>{len(self.arms[number].runs)}</td>"
                for kind in kinds:
                    if kind in of:
                        row += self._cells(cells[of[kind]], self._base(table, of[kind]), number, extents[kind])
                    else:
                        row += "<td></td>" * (3 if len(self.arms) > 1 else 1)
                yield f"<tr>{row}</tr>"
            yield "</tbody>"
        yield "</table></div>"

    def _base(self, table: Table, index: int) -> Cell:
        return table.cells[self.arms[0].name][index]

    def _cells(self, cell: Cell, base: Cell, number: int, extent: float) -> str:
        seeds = ", ".join(f"seed {seed}: {value:.4g}" for seed, value in cell.values.items())
        found = f'<td title="{escaped(seeds)}">{escaped(shown_cell(cell))}</td>'
        if len(self.arms) == 1:
            return found
        of = cell.difference
        if of is None or of.n == 0:
            return found + ("<td></td><td></td>" if number == 0 else "<td>–</td><td></td>")
        text = escaped(with_interval(of, "+"))
        half = of.half if of.n >= ENOUGH else math.nan
        drawn = strip(_pairs(cell, base), of.mean, half, extent)
        return (
            f'{found}<td>{f"<mark>{text}</mark>" if of.excludes_zero else text}</td><td class="a{number}">{drawn}</td>'
        )

    def _runs(self) -> Iterator[str]:
        yield "<section><h2>Runs</h2>"
        yield '<div class="wide"><table class="runs"><thead><tr>'
        heads = ("arm", "seed", "steps", "time", "tokens sampled", "folder", "tokens")
        yield "".join(f'<th scope="col">{head}</th>' for head in heads) + "</tr></thead><tbody>"
        for number, arm in enumerate(self.arms):
            for seed, run in arm.runs.items():
                yield (
                    f'<tr><th scope="row">{self._swatch(number)}<bdi>{escaped(arm.name)}</bdi></th>'
                    f"<td>{escaped(seed)}</td><td>{_steps(run)}</td><td>{_duration(_sum(run, 'time/step'))}</td>"
                    f"<td>{_sum(run, 'rollout/tokens'):,.0f}</td>"
                    f"<td><bdi><code>{escaped(run.folder)}</code></bdi></td><td>{self._link(run)}</td></tr>"
                )
        yield "</tbody></table></div></section>"

    def _link(self, run: Run) -> str:
        if run.inspector is None:
            return "–"
        path = os.path.relpath(run.inspector.resolve(), self.folder)
        return f'<a href="{escaped(quote(os.fsencode(path)))}" rel="noreferrer">inspect</a>'

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
            f"seed. The band is the 95 % interval of the mean (Student's t), from {ENOUGH} seeds on. With two seeds it would "
            "be 12.7 standard errors wide to each side. A band may go on beyond its panel."
        )
    if len(arms) > 1:
        yield (
            "“±” is half the 95 % interval. A difference is taken seed by seed, so what two arms share, such as the "
            "order of the questions, cancels. It is marked where its interval excludes 0. The dots beside it are the "
            "seeds, the line is its interval, the grey line is 0."
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


def _pieces(of: Curve) -> list[list[Point]]:
    pieces: list[list[Point]] = [[]]
    for x, y in zip(of.x, of.y, strict=True):
        if math.isfinite(y):
            pieces[-1].append((float(x), float(y)))
        else:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _kind(metric: Metric) -> str:
    return {"last": "last value", "mean": "mean of the curve"}.get(metric.statistic, "reached after")


def _row(metric: Metric) -> str:
    sign = {">=": " ≥ ", "<=": " ≤ "}.get(metric.statistic)
    return f"{metric.name}{sign}{metric.threshold:g}" if sign else metric.name


def _pairs(cell: Cell, base: Cell) -> list[float]:
    pairs = [cell.values[seed] - base.values[seed] for seed in cell.values if seed in base.values]
    return [value for value in pairs if math.isfinite(value)]


def _extent(cells: Sequence[Cell], base: Cell) -> float:
    """Half the width of the strips of a metric: all seeds, and intervals up to twice as far."""
    most = max((abs(value) for cell in cells[1:] for value in _pairs(cell, base)), default=0.0)
    found = [cell.difference for cell in cells if cell.difference is not None and cell.difference.n >= ENOUGH]
    ends = max((abs(one.mean) + one.half for one in found), default=0.0)
    return 1.05 * max(most, min(ends, 2 * most)) or 1.0


def _steps(run: Run) -> int:
    return int(max((value for _, value in run.scalars.get("epoch", [])), default=-1)) + 1


def _sum(run: Run, name: str) -> float:
    return math.fsum(value for _, value in run.scalars.get(name, []) if math.isfinite(value))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
