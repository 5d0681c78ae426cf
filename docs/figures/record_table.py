"""Writes the tables of docs/reference/records.md: the fields of the inspector's records.

    python docs/figures/record_table.py

A table stands under a comment with the name of its class, and has a row per field: the field's docstring.
"""

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "records.md"
SOURCE = ROOT / "grpo_lightning" / "plugins" / "looking" / "inspector" / "record.py"


def table(name: str) -> str:
    """The fields of the class `name` in record.py, as a table."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    rows = ["| field | meaning |", "|---|---|"]
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            meaning = " ".join(str(text.value.value).split()).replace("|", r"\|")
            rows.append(f"| `{field.target.id}` | {meaning} |")
    return "\n".join(rows)


def written(page: str) -> str:
    """The text of the page with its tables written anew."""
    return re.sub(r"(<!-- (\w+) -->\n\n)(?:\|.*\n)*\n?", lambda match: f"{match[1]}{table(match[2])}\n\n", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
