"""Matches a regular expression, which may take very long. Runs in a worker process."""

import re


def matches(pattern: str, text: str) -> bool:
    """Whether `pattern` matches all of `text`."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None
