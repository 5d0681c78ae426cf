"""Pages of HTML: text, small pictures, and the file, which is never one of a run's own."""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_lightning.types import UsageError

ASSETS = Path(__file__).with_name("assets")
NUM_COLORS = 7
"""Colours in the style; further arms repeat them with dashes."""


def escaped(text: Any) -> str:
    """Text for a page. What no page may hold, such as control characters, becomes a replacement character."""
    clean = str(text).encode("utf-8", "replace").decode("utf-8")
    return html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", clean))


def number(text: str) -> str:
    """A number for a page, with the sign that is as wide as a plus."""
    return escaped(text.replace("-", "\N{MINUS SIGN}"))


def counted(count: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def swatch(index: int) -> str:
    """A piece of an arm's line."""
    return (
        f'<svg class="swatch" viewBox="0 0 22 10" aria-hidden="true"><g class="key{index} k{index % NUM_COLORS}">'
        '<line class="mean" x1="1" x2="21" y1="5" y2="5"/><circle class="dot" cx="11" cy="5" r="3"/></g></svg>'
    )


def table(kind: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """A table of this class in a box that scrolls; heads and rows are HTML."""
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        "</div>"
    )


def filled(name: str, parts: Mapping[str, Any]) -> str:
    """A template in assets/ with its parts. They may contain what looks like the place of another: `{{script}}`."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: str(parts[place[1]]), (ASSETS / name).read_text(encoding="utf-8"))


def source_of(text: str) -> str:
    """The name of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def check_out(out: Path, default: str) -> None:
    """Finds before the runs are read what would fail, or destroy something, after."""
    if out.is_dir():
        raise UsageError(f"--out {out}: that is a folder. Give the name of a page, such as {out / default}")
    if out.suffix.lower() not in (".html", ".htm"):
        example = out.with_suffix(".html") if out.name else default
        raise UsageError(f"--out {out}: give the name of a page, such as {example}")


def write_page(out: Path, text: str) -> None:
    """Writes a page, and its folder if need be: a reader sees the old page or all of the new one.

    `training.disk` has the like, but the package `training` imports torch.
    """
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        partial.replace(out)
    except OSError as error:
        raise UsageError(f"--out {out}: it cannot be written ({error.strerror}). Give another with -o") from error
    finally:
        partial.unlink(missing_ok=True)
