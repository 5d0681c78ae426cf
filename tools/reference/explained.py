"""Finds the section of a hand-written page that explains an option: the section that names it most.

Nothing is listed by hand, so that a page can be moved, renamed or rewritten.
"""

import re
from collections import Counter
from typing import NamedTuple

from reference.places import FORMULAS, LISTS, Section, hand_written, relative

IN_HEADING, IN_PROSE, IN_CODE = 30, 3, 1
"""What a mention counts in a heading, in a sentence, and in a block of code, which uses an option without a word."""

USED_ONLY = 2 * IN_PROSE
"""A page whose mentions count less than this does not explain an option."""


class Place(NamedTuple):
    """Where an option is explained."""

    section: Section
    is_explained: bool
    """Whether its page explains the option, and does more than use it."""


def link(page: str, place: Place | None) -> str:
    """Returns a sentence with the link from a page to a place; empty if there is none."""
    if place is None:
        return ""
    section = place.section
    anchor = f"#{section.anchor}" if section.anchor else ""
    title = section.page_title if section.title == section.page_title else f"{section.page_title} › {section.title}"
    verb = "Explained" if place.is_explained else "Used"
    return f"{verb} in [{title}]({relative(section.path, page)}{anchor})."


def section_of_key(key: str, is_distinctive: bool) -> Place | None:
    """Returns the section that explains a key of the configuration, such as `loop.group_size`.

    Args:
        key: The key, with its sections.
        is_distinctive: Whether few options have the same last word, so that this word alone means the key.
    """
    name = key.rpartition(".")[2]
    full = rf"(?<![\w.]){re.escape(key)}(?!\w)"
    return most(name, f"{full}|{word(name)}" if is_distinctive else full)


def section_of_class(name: str) -> Place | None:
    """Returns the section that explains a class."""
    return most(name, rf"\b{name}\b")


def section_of_argument(owner: str, name: str) -> Place | None:
    """Returns the section that explains an argument of a class: it names both."""
    return most(name, word(name), owner)


def word(name: str) -> str:
    """Returns the pattern of an option's last word: in backquotes, as a key of YAML, or at the end of a flag."""
    return rf"`{name}`|`{name}[:= ]|(?<![\w.`]){name}:|\.{name}\b"


def most(name: str, pattern: str, owner: str = "") -> Place | None:
    """Returns the section that mentions an option most, on the page that does; None if there is none.

    Args:
        name: The last word of the option, which every mention has.
        pattern: The regular expression of a mention.
        owner: A word that the section must have too.
    """
    mention = re.compile(pattern)
    scores: dict[Section, int] = {}
    for section in hand_written():
        if name in section.text and owner in section.text and section.path not in LISTS:
            heading, _, text = section.text.partition("\n")
            prose, code = text, ""
            if "```" in text:
                prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
                code = "".join(re.findall(r"^```.*?^```", text, flags=re.MULTILINE | re.DOTALL))
            score = sum(
                weight * len(mention.findall(part))
                for weight, part in ((IN_HEADING, heading), (IN_PROSE, prose), (IN_CODE, code))
            )
            if score:
                scores[section] = score
    by_page = Counter[str]()
    for section, score in scores.items():
        by_page[section.path] += score
    pages = [page for page, _ in by_page.most_common()]
    explaining = [page for page in pages if by_page[page] >= USED_ONLY and page not in FORMULAS]
    explaining += [page for page in pages if page in FORMULAS]
    for page in [*explaining, *pages]:
        best = max((section for section in scores if section.path == page), key=lambda section: scores[section])
        return Place(best, page in explaining)
    return None
