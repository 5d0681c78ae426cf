"""Regular expressions and rewritings that carry their own examples. The tests run every example."""

import re
from collections.abc import Callable
from typing import NamedTuple

EXAMPLES: dict[re.Pattern[str], tuple[str, ...]] = {}
"""The examples of each pattern made by `rule`."""


def rule(pattern: str, *examples: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    r"""The compiled pattern, with examples of what it matches.

    In an example, « and » enclose each match: `rule(r"\d+", "«12» of «30»")`.
    An example marked from end to end matches as a whole. In an example without marks, nothing matches.
    """
    compiled = re.compile(pattern, flags)
    EXAMPLES[compiled] = EXAMPLES.get(compiled, ()) + examples
    return compiled


class Rewriting(NamedTuple):
    """A pattern and what replaces its matches; call it with a text to get the rewritten text."""

    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]
    """As in `re.sub`."""
    examples: tuple[str, ...]
    """`before -> after`."""

    def __call__(self, text: str) -> str:
        """The text with every match replaced."""
        return self.pattern.sub(self.replacement, text)


def rewriting(pattern: str, replacement: str | Callable[[re.Match[str]], str], *examples: str) -> Rewriting:
    r"""A rewriting with examples: `rewriting(r"\s+", " ", "7   apples -> 7 apples")`."""
    return Rewriting(re.compile(pattern), replacement, examples)
