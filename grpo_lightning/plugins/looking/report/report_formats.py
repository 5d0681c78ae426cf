"""The tables of a report as Markdown, LaTeX or CSV; what such a file reads as syntax is escaped in all texts."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.plugins.looking.report.report_tables import ReportTable, TableRow

MOST_COLUMNS = 8
"""LaTeX's tables are split beyond: a page in portrait has no room for more."""

CSV_COLUMNS = ("metric", "scope", "arm", "seeds", "statistic", "text", "value", "half_width", "n", "marked", "basis")
"""The head of a table as CSV, which has a row per number."""


def as_markdown(tables: Sequence[ReportTable]) -> str:
    """Returns the tables for a README or a pull request, a row per metric and arm; marked differences are bold."""
    texts = []
    for table in tables:
        rows = [
            ["metric", "arm", "seeds", *map(_markdown, table.header)],
            ["---", "---", *["--:"] * (1 + len(table.header))],
        ]
        rows += [
            [_markdown(_label(row)), _markdown(row.arm), str(row.num_seeds), *_cells(row, _markdown, "**{}**")]
            for row in table.rows
        ]
        texts.append("".join(f"| {' | '.join(row)} |\n" for row in rows))
    return "\n".join(texts)


def as_latex(tables: Sequence[ReportTable]) -> str:
    """Returns the tables for a paper, as environments `tabular`; the document needs no package for them."""
    texts = [_latex_characters()["head"]]
    num_cells = MOST_COLUMNS - 2
    for table in tables:
        for start in range(0, len(table.header), num_cells):
            texts.append("\n".join(_tabular(table, slice(start, start + num_cells))) + "\n")
    return "\n".join(texts)


def as_csv(tables: Sequence[ReportTable]) -> str:
    """Returns the numbers of the tables, unrounded, a row each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        for row in table.rows:
            statistic = ""
            for head, cell in zip(table.header, row.cells, strict=True):
                # A difference stands behind the statistic that it is of.
                statistic = f"{statistic} {head}" if head.startswith("vs. ") else head
                if cell.text:
                    numbers = [cell.estimate.mean, cell.estimate.half, cell.estimate.n] if cell.estimate else [""] * 3
                    context = [row.metric, row.scope, row.arm, row.num_seeds, statistic, cell.text]
                    writer.writerow([*context, *numbers, int(cell.is_marked), cell.basis])
    return out.getvalue()


FORMATS: dict[str, Callable[[Sequence[ReportTable]], str]] = {"md": as_markdown, "tex": as_latex, "csv": as_csv}
"""Functions that write tables, by the end of the file's name."""


def _label(row: TableRow) -> str:
    return f"{row.metric} ({row.scope})"


def _cells(row: TableRow, escape: Callable[[str], str], mark: str, columns: slice = slice(None)) -> Iterator[str]:
    """Yields the escaped texts of a row's cells, with `mark` around those that are marked."""
    for cell in row.cells[columns]:
        text = escape(cell.text.replace("-", "\N{MINUS SIGN}"))
        marked = mark.format(text) if cell.is_marked else text
        yield f"{marked} ({escape(cell.basis)})" if cell.basis else marked


def _markdown(text: str) -> str:
    """Returns text in one line whose characters mean themselves."""
    return re.sub(r"([\\`*_|<\[\]])", r"\\\1", " ".join(text.split()))


def _tabular(table: ReportTable, columns: slice) -> Iterator[str]:
    """Yields the lines of a table with some of its columns of cells."""
    header = ["", "seeds", *map(_latex, table.header[columns])]
    yield rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"
    yield r"\toprule"
    yield _latex_row(header)
    yield r"\midrule"
    # An arm alone needs no name: its rows have those of the metrics.
    is_alone = len({row.arm for row in table.rows}) == 1
    for rows in table.row_groups():
        if not is_alone:
            yield rf"\multicolumn{{{len(header)}}}{{l}}{{\textit{{{_latex(_label(rows[0]))}}}}} \\"
        for row in rows:
            name = _label(row) if is_alone else row.arm
            yield _latex_row([_latex(name), str(row.num_seeds), *_cells(row, _latex, r"\textbf{{{}}}", columns)])
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex(text: str) -> str:
    """Returns text for LaTeX; a letter that pdflatex cannot set becomes its number, such as U+4F60."""
    characters = _latex_characters()
    commands = characters["commands"]

    def command(letter: str) -> str:
        if letter in commands:
            return str(commands[letter])
        is_plain = (letter.isascii() and letter.isprintable()) or letter in characters["letters"]
        return letter if is_plain else f"U+{ord(letter):04X}"

    return "".join(map(command, text))


@cache
def _latex_characters() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_name("latex.yaml").read_text(encoding="utf-8")))
