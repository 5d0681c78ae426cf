"""The table of a report: every metric of every arm, and the differences to the first."""

import math
from collections.abc import Iterator, Mapping, Sequence

from grpo_lightning.plugins.inspect.comparison import AXES, Cell, Metric, Table, shown, with_interval
from grpo_lightning.plugins.inspect.markup import counted, escaped, number, swatch

HEADS = {"last": "last value", "mean": "mean of the curve"}
"""The columns' heads by statistic; that of a threshold is `reached after`."""


def results(table: Table, metrics: Sequence[Metric]) -> Iterator[str]:
    """A sentence, and a table of the statistics as HTML; the thresholds have a second one."""
    base = next(iter(table.cells))
    differences = [cell.difference for cells in table.cells.values() for cell in cells]
    if tested := [one for one in differences if one is not None and math.isfinite(one.half)]:
        marked = sum(one.excludes_zero for one in tested)
        yield (
            f"<p>Of {counted(len(tested), 'difference')} to <bdi>{escaped(base)}</bdi>, "
            f"<strong>{marked}</strong> {'has' if marked == 1 else 'have'} an interval that excludes 0, "
            f"<mark>marked</mark>. Were all arms equal, about {0.05 * len(tested):.2g} would have one by chance.</p>"
        )
    for are_thresholds in (False, True):
        chosen = {i: metric for i, metric in enumerate(metrics) if metric.is_threshold == are_thresholds}
        if chosen:
            yield from _rows(table, chosen)


def _rows(table: Table, chosen: Mapping[int, Metric]) -> Iterator[str]:
    base, *others = table.cells
    kinds = list(dict.fromkeys(map(_kind, chosen.values())))
    versus = f'<th scope="col">vs. <bdi>{escaped(base)}</bdi></th>' if others else ""
    heads = "".join(f'<th scope="col">{kind}</th>{versus}' for kind in kinds)
    yield '<div class="wide"><table class="numbers"><thead><tr><th scope="col">arm</th><th scope="col">seeds</th>'
    yield f"{heads}</tr></thead>"
    width = 2 if others else 1
    for name in dict.fromkeys(map(_row, chosen.values())):
        of = {_kind(metric): index for index, metric in chosen.items() if _row(metric) == name}
        index = next(iter(of.values()))
        until = "" if chosen[index].is_threshold else f"up to {table.labels[index].rpartition(' ')[2]} "
        yield f'<tbody><tr class="metric"><th scope="rowgroup" colspan="{2 + len(kinds) * width}">'
        yield f"{escaped(name)} <small>{escaped(until + AXES[table.axis])}</small></th></tr>"
        for arm_number, (arm, cells) in enumerate(table.cells.items()):
            yield f'<tr><th scope="row">{swatch(arm_number)}<bdi>{escaped(arm)}</bdi></th>'
            yield f"<td>{len(cells[0].values)}</td>"
            for kind in kinds:
                yield _value(cells[of[kind]]) if kind in of else "<td></td>"
                if others:
                    yield f"<td>{_difference(cells[of[kind]]) if kind in of and arm != base else ''}</td>"
            yield "</tr>"
        yield "</tbody>"
    yield "</table></div>"


def _value(cell: Cell) -> str:
    seeds = ", ".join(f"seed {seed}: {value:.4g}" for seed, value in cell.values.items())
    return f'<td title="{escaped(seeds)}">{number(shown(cell))}</td>'


def _difference(cell: Cell) -> str:
    of = cell.difference
    if of is None or of.n == 0:
        return "–"
    text = number(with_interval(of, "+"))
    return f"<mark>{text}</mark>" if of.excludes_zero else text


def _kind(metric: Metric) -> str:
    return HEADS.get(metric.statistic, "reached after")


def _row(metric: Metric) -> str:
    sign = {">=": " ≥ ", "<=": " ≤ "}.get(metric.statistic)
    return f"{metric.name}{sign}{metric.threshold:g}" if sign else metric.name
