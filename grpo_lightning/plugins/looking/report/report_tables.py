"""The tables of a report as plain data: texts in rows, which any format can take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from grpo_lightning.plugins.looking.pages.markup import counted
from grpo_lightning.plugins.looking.report.arm_comparison import (
    AXES,
    Cell,
    ComparisonTable,
    Estimate,
    Metric,
    value_of,
    with_interval,
)


@dataclass(frozen=True)
class TableCell:
    """A number as text, and what it rests on."""

    text: str
    """The number with its interval, or `–`; empty where the row has no such column, and for the base's difference."""
    basis: str = ""
    """What the number was taken of, such as `3 seeds, step 60`, or why there is none."""
    values: str = ""
    """The value of each seed; empty for a difference."""
    is_marked: bool = False
    """True for a difference whose interval excludes 0."""
    estimate: Estimate | None = None
    """The number before it was rounded; None if there is none."""


@dataclass(frozen=True)
class TableRow:
    """The numbers of one arm in one metric."""

    metric: str
    """The scalar, with the threshold if there is one."""
    scope: str
    """How far the metric counts, and along which axis, such as `up to 60 exploration steps`."""
    arm: str
    """The arm's name."""
    arm_index: int
    """The arm's position among the arms, which chooses its colour."""
    num_seeds: int
    """The arm's runs."""
    cells: tuple[TableCell, ...]
    """The cells, one below each head."""


@dataclass(frozen=True)
class ReportTable:
    """A table without its format. Rows of one metric follow one another."""

    header: tuple[str, ...]
    """The heads of the cells; the columns of metric, arm and seeds before them have none."""
    rows: tuple[TableRow, ...]
    """A row per metric and arm."""

    def row_groups(self) -> list[list[TableRow]]:
        """Returns the rows of each metric, a list per metric."""
        return [[*rows] for _, rows in groupby(self.rows, lambda row: (row.metric, row.scope))]


def tables_of(comparison: ComparisonTable, metrics: Sequence[Metric]) -> list[ReportTable]:
    """Returns a table of statistics in the metric's unit, and a table of the x where thresholds were reached.

    Args:
        comparison: The statistics of the metrics.
        metrics: The metrics that were compared.
    """
    tables = []
    for are_thresholds in (False, True):
        columns = [index for index, metric in enumerate(metrics) if metric.is_threshold == are_thresholds]
        if columns:
            tables.append(_table(comparison, metrics, columns))
    return tables


def _table(comparison: ComparisonTable, metrics: Sequence[Metric], columns: Sequence[int]) -> ReportTable:
    heads = list(dict.fromkeys(_head(metrics[index]) for index in columns))
    # The metrics of a row by its name and scope, and there by head.
    index_by_head: dict[tuple[str, str], dict[str, int]] = {}
    for index in columns:
        metric = metrics[index]
        sign = {">=": f" ≥ {metric.threshold:g}", "<=": f" ≤ {metric.threshold:g}"}.get(metric.statistic, "")
        until = "" if sign else f"up to {comparison.labels[index].rpartition(' ')[2]} "
        row_name = (metric.name + sign, until + AXES[comparison.axis])
        index_by_head.setdefault(row_name, {})[_head(metric)] = index

    base, *compared_arms = comparison.cells
    rows = []
    for (name, scope), indices in index_by_head.items():
        for arm_index, (arm, cells) in enumerate(comparison.cells.items()):
            texts: list[TableCell] = []
            for head in heads:
                cell = cells[indices[head]] if head in indices else None
                texts.append(_value(cell) if cell else TableCell(""))
                if compared_arms:
                    texts.append(_difference(cell) if cell and arm != base else TableCell(""))
            rows.append(TableRow(name, scope, arm, arm_index, len(cells[0].values), tuple(texts)))
    header = [text for head in heads for text in ([head, f"vs. {base}"] if compared_arms else [head])]
    return ReportTable(tuple(header), tuple(rows))


def _head(metric: Metric) -> str:
    """Returns the head of a metric's column."""
    if metric.is_threshold:
        return "reached after"
    if metric.statistic == "mean":
        return "mean of the curve"
    return "last value" if metric.num_points == 1 else f"mean of the last {metric.num_points}"


def _value(cell: Cell) -> TableCell:
    values = ", ".join(f"seed {seed}: {value:.4g}" for seed, value in cell.values.items())
    basis = _basis(cell.estimate, len(cell.values))
    estimate = cell.estimate
    if math.isfinite(cell.at_least):
        basis = f"{estimate.n} of {counted(len(cell.values), 'seed')} reached it"
        # The mean of those that reached it would be too low.
        estimate = Estimate(cell.at_least, math.nan, estimate.n)
    elif estimate.n == 0:
        return TableCell("–", "nothing measured up to there", values)
    elif cell.steps:
        first_step, last_step = cell.steps[0], cell.steps[-1]
        basis += f", step {last_step}" if first_step == last_step else f", steps {first_step} to {last_step}"
    return TableCell(value_of(cell), basis, values, estimate=estimate)


def _difference(cell: Cell) -> TableCell:
    difference = cell.difference
    if difference is None:
        return TableCell("–", cell.reason)
    basis = _basis(difference, difference.n)
    if math.isfinite(difference.unpaired_half) and math.isfinite(difference.half):
        gain = difference.unpaired_half / difference.half
        basis += f"; unpaired ± {difference.unpaired_half:.2g}, {gain:.1f} times as wide"
    return TableCell(with_interval(difference, "+"), basis, is_marked=difference.excludes_zero, estimate=difference)


def _basis(estimate: Estimate, num_seeds: int) -> str:
    """Returns the number of seeds and questions of an estimate, and why it has no interval or no mark."""
    seeds = counted(num_seeds, "seed")
    seeds = seeds if estimate.n == num_seeds else f"{estimate.n} of {seeds}"
    seeds += f" × {estimate.num_questions} questions" if estimate.num_questions else ""
    if estimate.n > 1 and math.isnan(estimate.half):
        return f"{seeds}, all equal"
    return seeds
