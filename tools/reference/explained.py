"""Finds the section of a hand-written page that explains an option: the section that names it most.

Nothing is listed by hand, so that a page can be moved, renamed or rewritten.
"""

import re
from collections import Counter
from collections.abc import Callable

from reference.places import FORMULAS, LISTS, Section, hand_written, relative

HEADING_COUNTS = 10
"""A section with the name in its heading counts as much as one with ten more mentions."""


def link(page: str, section: Section | None) -> str:
    """Returns a sentence with the link from a page to a section; empty if there is none."""
    if section is None:
        return ""
    anchor = f"#{section.anchor}" if section.anchor else ""
    title = section.page_title if section.title == section.page_title else f"{section.page_title}: {section.title}"
    return f"Explained in [{title}]({relative(section.path, page)}{anchor})."


def section_of_key(key: str, is_unique: bool) -> Section | None:
    """Returns the section that explains a key of the configuration, such as `loop.group_size`.

    Args:
        key: The key, with its sections.
        is_unique: Whether no other option has the same last word, so that this word alone means the key.
    """
    full = re.compile(rf"(?<![\w.]){re.escape(key)}(?!\w)")
    last = word(key.rpartition(".")[2])
    return most(lambda text: len(full.findall(text))) or (
        most(lambda text: len(last.findall(text))) if is_unique else None
    )


def section_of_class(name: str) -> Section | None:
    """Returns the section that explains a class."""
    pattern = re.compile(rf"\b{name}\b")
    return most(lambda text: len(pattern.findall(text)))


def section_of_argument(owner: str, name: str) -> Section | None:
    """Returns the section that explains an argument of a class: it names both."""
    owner_pattern = re.compile(rf"\b{owner}\b")
    name_pattern = word(name)
    return most(lambda text: len(name_pattern.findall(text)) if owner_pattern.search(text) else 0)


def word(name: str) -> re.Pattern[str]:
    """Returns the pattern of an option's last word: in backquotes, as a key of YAML, or at the end of a flag."""
    return re.compile(rf"`{name}`|`{name}[:= ]|(?<![\w.]){name}:|\.{name}\b")


def most(count: Callable[[str], int]) -> Section | None:
    """Returns the section with the most mentions, on the page with the most; None if nothing is mentioned."""
    mentions = {section: count(section.text) for section in hand_written() if section.path not in LISTS}
    scores = {
        section: number + (HEADING_COUNTS if count(section.title + "\n") or count(f"`{section.title}`") else 0)
        for section, number in mentions.items()
        if number
    }
    by_page = Counter[str]()
    for section, score in scores.items():
        by_page[section.path] += score
    pages = [page for page, _ in by_page.most_common()]
    # A page that names it once only uses it. Then the page of formulas says what it is.
    named_often = [page for page in pages if by_page[page] > 1 and page not in FORMULAS]
    for page in [*named_often, *(page for page in pages if page in FORMULAS), *pages]:
        return max((section for section in scores if section.path == page), key=lambda section: scores[section])
    return None
