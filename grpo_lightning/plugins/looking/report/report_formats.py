"""The tables of a report as Markdown, LaTeX or CSV: templates in pages/assets, and what such a file reads as syntax."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from grpo_lightning.plugins.looking.pages.markup import ASSETS
from grpo_lightning.plugins.looking.report.report_tables import ReportTable

MOST_CELLS = 6
"""LaTeX's tables are split beyond so many columns, besides those of names and seeds: a page has no room for more."""


def formatted(tables: Sequence[ReportTable], ending: str) -> str:
    """Returns the tables as text; marked differences are bold, and CSV has a row per number.

    Args:
        tables: The tables.
        ending: A key of `ESCAPES`.
    """
    return plain_text(f"numbers.{ending}", tables=tables, most_cells=MOST_CELLS)


def plain_text(name: str, **variables: Any) -> str:
    """Returns a template in assets/ with the values of its variables, escaped as its ending wants."""
    escape = ESCAPES[name.rpartition(".")[2]]
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        finalize=lambda value: escape(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Braces are LaTeX's.
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
    environment.filters["letter"] = lambda text, texts: (
        chr(ord("a") + texts.index(text) % 26) * (texts.index(text) // 26 + 1)
    )
    environment.filters["minus"] = lambda text: text.replace("-", "\N{MINUS SIGN}")
    return environment.get_template(name).render(variables)


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<\[\]])", r"\\\1", " ".join(text.split()))


def _latex(text: str) -> str:
    """Returns text for LaTeX; a character that pdflatex cannot set becomes its number, such as U+4F60."""
    table = _latex_characters()
    is_plain = re.compile(rf"[ -~{table['letters']}]")
    return "".join(
        table["commands"].get(character) or (character if is_plain.match(character) else f"U+{ord(character):04X}")
        for character in text
    )


@cache
def _latex_characters() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_name("latex.yaml").read_text(encoding="utf-8")))


def _csv(text: str) -> str:
    return '"{}"'.format(text.replace('"', '""')) if re.search(r'[",\r\n]', text) else text


ESCAPES = {"md": _markdown, "tex": _latex, "csv": _csv}
"""Functions that return text whose characters mean themselves, by the end of the file's name."""
