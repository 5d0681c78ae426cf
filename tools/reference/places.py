"""Where things are: the public names and their files, the pages that people wrote, and the anchors of headings."""

import os
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import grpo_lightning

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "docs/reference"
"""The folder of the generated pages."""

MODULES: dict[str, str] = vars(grpo_lightning)["_FILES"]
"""The module of each public name."""

FORMULAS = "docs/reference/methods.md"
"""The page with a row per class. It names every class, and explains an option only where no other page does."""

LISTS = [f"docs/reference/{name}.md" for name in ("faq", "glossary", "metrics", "models", "records")]
"""Pages that name options in passing."""


class Section(NamedTuple):
    """A part of a page that a person wrote, from one heading to the next."""

    path: str
    """The path of the page in the repository."""
    page_title: str
    title: str
    anchor: str
    """What a link to the section has after the `#`; empty for the beginning of the page."""
    text: str


def anchor_of(heading: str) -> str:
    """Returns the anchor that mkdocs gives to a heading."""
    ascii_text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_text).strip().lower())


def title_of(text: str) -> str:
    """Returns the first heading of a page."""
    return text.splitlines()[0].removeprefix("# ")


def relative(path: str, page: str) -> str:
    """Returns the link from a page to a path, both given from the top of the repository."""
    return os.path.relpath(path, os.path.dirname(page)).replace(os.sep, "/")


def headings_of(text: str) -> Iterator[re.Match[str]]:
    """Yields the headings of a page, outside blocks of code."""
    for match in re.finditer(r"^(?:```.*?^```|#+ (?P<title>[^\n]*))", text, re.MULTILINE | re.DOTALL):
        if match["title"]:
            yield match


def anchors_of(text: str) -> set[str]:
    """Returns what a link may name in a page: its headings, and the anchors that are set."""
    set_anchors = re.findall(r'(?:{ #|<a id=")([^ "]+)', text)
    return {anchor_of(match["title"]) for match in headings_of(text)} | {*set_anchors}


@cache
def hand_written() -> tuple[Section, ...]:
    """Returns the sections of the pages that people wrote."""
    return tuple(section for path in sorted(ROOT.glob("docs/**/*.md")) for section in sections_of(path))


def sections_of(path: Path) -> Iterator[Section]:
    """Yields the sections of a page."""
    text = path.read_text(encoding="utf-8")
    # A heading may contain a link.
    headings = [(match.start(), re.sub(r"\]\([^)]*\)|[\[`*]", "", match["title"])) for match in headings_of(text)]
    ends = [start for start, _ in headings[1:]] + [len(text)]
    for (start, title), end in zip(headings, ends, strict=True):
        anchor = anchor_of(title) if start else ""
        yield Section(str(path.relative_to(ROOT)), headings[0][1], title, anchor, text[start:end])


@cache
def public_classes() -> dict[str, type]:
    """Returns the public classes by name."""
    values = {name: getattr(grpo_lightning, name) for name in MODULES}
    return {name: value for name, value in values.items() if isinstance(value, type)}


def first_sentence(value: Any) -> str:
    """Returns the first line of a docstring."""
    return (value.__doc__ or "").strip().partition("\n")[0]
