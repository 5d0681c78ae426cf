"""Matches a regular expression, which may take for ever. Runs inside a sandbox process."""

import re


def matches(pattern: str, text: str) -> bool:
    """Whether `pattern` matches all of `text`."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None
