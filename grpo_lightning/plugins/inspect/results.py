"""The table of a report: every metric of every arm, and the differences to the first."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_lightning.plugins.inspect.charts import strip
from grpo_lightning.plugins.inspect.comparison import AXES, Metric, Table, shown
from grpo_lightning.plugins.inspect.estimates import ENOUGH, with_interval
from grpo_lightning.plugins.inspect.markup import counted, escaped, number, swatch


@dataclass(frozen=True)
class Results:
    """A comparison, laid out as HTML."""

    table: Table
    metrics: Sequence[Metric]

    @property
    def base(self) -> str:
        """The arm that the others are compared with."""
        return next(iter(self.table.cells))

    @property
    def width(self) -> int:
        """Columns per statistic: the value, and with several arms the difference and its picture."""
        return 3 if len(self.table.cells) > 1 else 1

    def html(self) -> Iterator[str]:
        """A sentence, and a table of the statistics; the thresholds have a second one."""
        yield self._summary()
        for are_thresholds in (False, True):
            chosen = {i: metric for i, metric in enumerate(self.metrics) if metric.is_threshold == are_thresholds}
            if chosen:
                yield from self._rows(chosen)

    def _summary(self) -> str:
        found = [cell.difference for cells in self.table.cells.values() for cell in cells]
        tested = [one for one in found if one is not None and math.isfinite(one.half)]
        if not tested:
            return ""
        marked = sum(one.excludes_zero for one in tested)
        return (
            f"<p>Of {counted(len(tested), 'difference')} to <bdi>{escaped(self.base)}</bdi>, "
            f"<strong>{marked}</strong> {'has' if marked == 1 else 'have'} an interval that excludes 0, "
            f"<mark>marked</mark>. Were all arms equal, about {0.05 * len(tested):.2g} would have one by chance.</p>"
        )

    def _rows(self, chosen: Mapping[int, Metric]) -> Iterator[str]:
        kinds = list(dict.fromkeys(map(_kind, chosen.values())))
        yield f'<div class="wide"><table class="numbers"><thead><tr>{self._heads(kinds)}</tr></thead>'
        for name in dict.fromkeys(map(_row, chosen.values())):
            of = {_kind(metric): index for index, metric in chosen.items() if _row(metric) == name}
            yield f'<tbody><tr class="metric"><th scope="rowgroup" colspan="{2 + len(kinds) * self.width}">'
            yield f"{escaped(name)} <small>{escaped(self._until(next(iter(of.values()))))}</small></th></tr>"
            for arm_number, (arm, cells) in enumerate(self.table.cells.items()):
                yield f'<tr><th scope="row">{swatch(arm_number)}<bdi>{escaped(arm)}</bdi></th>'
                yield f"<td>{len(cells[0].values)}</td>"
                for kind in kinds:
                    yield self._cell(arm_number, arm, of[kind]) if kind in of else "<td></td>" * self.width
                yield "</tr>"
            yield "</tbody>"
        yield "</table></div>"

    def _heads(self, kinds: Sequence[str]) -> str:
        heads = '<th scope="col">arm</th><th scope="col">seeds</th>'
        for kind in kinds:
            heads += f'<th scope="col">{kind}</th>'
            if self.width > 1:
                heads += f'<th scope="col" colspan="2">vs. <bdi>{escaped(self.base)}</bdi></th>'
        return heads

    def _until(self, index: int) -> str:
        """How far the runs were read; of a threshold what is counted."""
        axis = AXES[self.table.axis]
        if self.metrics[index].is_threshold:
            return axis
        return f"up to {self.table.labels[index].rpartition(' ')[2]} {axis}"

    def _cell(self, arm_number: int, arm: str, index: int) -> str:
        cell = self.table.cells[arm][index]
        seeds = ", ".join(f"seed {seed}: {value:.4g}" for seed, value in cell.values.items())
        found = f'<td title="{escaped(seeds)}">{number(shown(cell))}</td>'
        of = cell.difference
        if self.width == 1:
            return found
        if of is None or of.n == 0:
            return f"{found}<td>{'' if arm == self.base else '–'}</td><td></td>"
        picture = strip(self._pairs(arm, index), of.mean, of.half, self._extent(index)) if of.n >= ENOUGH else ""
        text = number(with_interval(of, "+"))
        text = f"<mark>{text}</mark>" if of.excludes_zero else text
        return f'{found}<td>{text}</td><td class="a{arm_number}">{picture}</td>'

    def _pairs(self, arm: str, index: int) -> list[float]:
        """The differences of the seeds."""
        own, base = self.table.cells[arm][index].values, self.table.cells[self.base][index].values
        pairs = [own[seed] - base[seed] for seed in own if seed in base]
        return [value for value in pairs if math.isfinite(value)]

    def _extent(self, index: int) -> float:
        """Half the width of a metric's pictures: all seeds, and intervals up to twice as far."""
        arms = [arm for arm in self.table.cells if arm != self.base]
        most = max((abs(value) for arm in arms for value in self._pairs(arm, index)), default=0.0)
        found = [self.table.cells[arm][index].difference for arm in arms]
        ends = max((abs(one.mean) + one.half for one in found if one is not None and one.n >= ENOUGH), default=0.0)
        return 1.05 * max(most, min(ends, 2 * most)) or 1.0


def _kind(metric: Metric) -> str:
    return {"last": "last value", "mean": "mean of the curve"}.get(metric.statistic, "reached after")


def _row(metric: Metric) -> str:
    sign = {">=": " ≥ ", "<=": " ≤ "}.get(metric.statistic)
    return f"{metric.name}{sign}{metric.threshold:g}" if sign else metric.name
