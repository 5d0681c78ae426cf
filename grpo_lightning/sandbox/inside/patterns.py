"""Searches for regular expressions in a worker process, since they may take very long."""

import re


def matches(pattern: str, text: str) -> bool:
    """Returns True if `pattern` matches all of `text`."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def ends(pattern: str, text: str) -> list[int]:
    """Returns the index of the character after every match of `pattern`."""
    return [match.end() for match in re.finditer(pattern, text)]
