"""Pages of HTML: their templates in assets/, and the file that a page is written to."""

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
    """Returns text without control characters and the like, which no page may hold; HTML stays as it is."""
    if value is None or isinstance(value, Markup):
        return "" if value is None else value
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


@cache
def templates() -> Environment:
    """Returns the templates in assets/, which escape all text."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, finalize=clean, undefined=StrictUndefined
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters["counted"] = counted
    environment.filters["minus"] = lambda text: text.replace("-", "\N{MINUS SIGN}")  # as wide as a plus
    environment.filters["duration"] = lambda seconds: str(timedelta(seconds=round(seconds)))
    return environment


def filled(name: str, **variables: Any) -> Markup:
    """Returns a template in assets/ with the values of its variables."""
    return Markup(templates().get_template(name).render(variables))


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun: `1 run`, `2 runs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def source_of(text: str) -> str:
    """Returns the source of an inline script or style for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def check_out(out: Path, default: str) -> None:
    """Refuses a path that no page can be written to, before the runs are read."""
    require(not out.is_dir(), f"--out {out}: that is a folder. Give the name of a page, such as {out / default}")
    example = out.with_suffix(".html") if out.name else default
    require(out.suffix.lower() in (".html", ".htm"), f"--out {out}: give the name of a page, such as {example}")


def write_page(out: Path, text: str) -> None:
    """Writes a page, and its folder if it is absent: a reader sees the old page or all of the new page."""
    try:
        write_whole(out, text)
    except OSError as error:
        raise UsageError(f"--out {out}: it cannot be written ({error.strerror}). Give another with -o") from error
