"""Searches for regular expressions, which may take very long. Runs in a worker process."""

import re


def matches(pattern: str, text: str) -> bool:
    """True if `pattern` matches all of `text`."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def ends(pattern: str, text: str) -> list[int]:
    """The index of the character after every match of `pattern`."""
    return [match.end() for match in re.finditer(pattern, text)]
