"""Pages of HTML: their templates in assets/, and the file, which is never one of a run's own."""

import base64
import hashlib
import re
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_lightning.disk import write_whole
from grpo_lightning.types import UsageError, require

ASSETS = Path(__file__).with_name("assets")


def clean(value: Any) -> Any:
    """Text without what no page may hold, such as control characters; what is HTML already stays."""
    if value is None or isinstance(value, Markup):
        return "" if value is None else value
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


@cache
def templates() -> Environment:
    """The templates in assets/, which escape all text."""
    made = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, finalize=clean, undefined=StrictUndefined)
    made.trim_blocks = made.lstrip_blocks = True
    made.filters["counted"] = counted
    made.filters["minus"] = lambda text: text.replace("-", "\N{MINUS SIGN}")  # as wide as a plus
    made.filters["duration"] = lambda seconds: str(timedelta(seconds=round(seconds)))
    return made


def filled(name: str, **parts: Any) -> Markup:
    """A template in assets/ with its parts."""
    return Markup(templates().get_template(name).render(parts))


def counted(count: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def source_of(text: str) -> str:
    """The name of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def check_out(out: Path, default: str) -> None:
    """Finds before the runs are read what would fail, or destroy something, after."""
    require(not out.is_dir(), f"--out {out}: that is a folder. Give the name of a page, such as {out / default}")
    example = out.with_suffix(".html") if out.name else default
    require(out.suffix.lower() in (".html", ".htm"), f"--out {out}: give the name of a page, such as {example}")


def write_page(out: Path, text: str) -> None:
    """Writes a page, and its folder if need be: a reader sees the old page or all of the new one."""
    try:
        write_whole(out, text)
    except OSError as error:
        raise UsageError(f"--out {out}: it cannot be written ({error.strerror}). Give another with -o") from error
