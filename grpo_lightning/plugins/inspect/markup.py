"""Text and small pictures as HTML."""

import html
import re
from typing import Any

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
