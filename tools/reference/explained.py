"""Finds the section of a hand-written page that explains an option: the section that names it most.

Nothing is listed by hand, so that a page can be moved, renamed or rewritten.
"""

import re
from collections import Counter

from reference.places import FORMULAS, LISTS, Section, hand_written, relative

IN_HEADING, IN_PROSE, IN_CODE = 30, 3, 1
"""What a mention counts in a heading, in a sentence, and in a block of code, which uses an option without a word."""

MOST_OWNERS = 3
"""A name that more classes have, such as `path`, says nothing without its section."""

USED_ONLY = 2 * IN_PROSE
"""A page whose mentions count less than this does not explain an option."""


def link(page: str, section: Section | None) -> str:
    """Returns a sentence with the link from a page to a section; empty if there is none."""
    if section is None:
        return ""
    anchor = f"#{section.anchor}" if section.anchor else ""
    title = section.page_title if section.title == section.page_title else f"{section.page_title} › {section.title}"
    return f"See [{title}]({relative(section.path, page)}{anchor})."


def section_of_key(key: str, num_owners: int) -> Section | None:
    """Returns the section that explains a key of the configuration, such as `loop.group_size`.

    Args:
        key: The key, with its sections.
        num_owners: How many classes have an argument with the key's last word. If it is one, the word alone means the
            key; if they are few, the word means it beside the section's name.
    """
    name = key.rpartition(".")[2]
    full = rf"(?<![\w.]){re.escape(key)}(?!\w)"
    section_name = key.split(".")[-2] if "." in key else ""
    pattern = full if num_owners > MOST_OWNERS else f"{full}|{word(name)}"
    return most(name, pattern, section_name if num_owners > 1 else "")


def section_of_class(name: str) -> Section | None:
    """Returns the section that explains a class."""
    return most(name, rf"\b{name}\b")


def section_of_argument(owner: str, name: str) -> Section | None:
    """Returns the section that explains an argument of a class: it names both."""
    return most(name, word(name), owner)


def word(name: str) -> str:
    """Returns the pattern of an option's last word: in backquotes, as a key of YAML, or at the end of a flag."""
    return rf"`{name}`|`{name}[:= ]|(?<![\w.`]){name}:|\.{name}\b"


def most(name: str, pattern: str, owner: str = "") -> Section | None:
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

    def order(section: Section) -> tuple[bool, bool, int, int]:
        """Sections that explain come first; the page of formulas explains where no other page does."""
        explains = section.path == FORMULAS or by_page[section.path] >= USED_ONLY
        return explains, section.path != FORMULAS, scores[section] + by_page[section.path], scores[section]

    return max(scores, key=order, default=None)
