"""Reads plain numbers in the process of the run itself. Everything else is compared in a worker."""

import re
from fractions import Fraction
from functools import lru_cache

from grpo_lightning.plugins.rewards.verifier.grammar import Claim, read_claim
from grpo_lightning.plugins.rewards.verifier.numbers import literal
from grpo_lightning.plugins.rewards.verifier.sentences import read_sentence
from grpo_lightning.plugins.rewards.verifier.tokens import Unreadable

MAX_CHARS = 2000
"""Length of the longest text that is read as a number, unless it is digits alone."""

_PLAIN = re.compile(r"-?\$?(?:[1-9]\d{0,2}(?:,\d{3}){1,60}|\d{1,200})(?:\.\d{1,100})?", re.ASCII)


@lru_cache(maxsize=1 << 16)
def plain_number(text: str) -> Fraction | None:
    """Returns the value of `18`, `-3`, `1,234.50` and `$18`; None for other spellings."""
    return Fraction(text.replace(",", "").replace("$", "")) if _PLAIN.fullmatch(text) else None


@lru_cache(maxsize=1 << 14)
def number(text: str) -> Fraction | None:
    r"""Returns the value of an answer that is one number in any spelling: `\frac12`, `37.5\%`, `7 3/4`, `x = 3 cm`."""
    value = plain_number(text)
    if value is not None or len(text) > MAX_CHARS:
        return value
    try:
        claim: Claim | None = read_claim(text)
    except Unreadable:
        claim = None
    except RecursionError:
        return None
    if not claim or claim.items[0].value[0] == "words":
        claim = read_sentence(text, frozenset())
    if not claim:
        return None

    # Symbols may stand before the number, as in `x = y = 3`.
    _, operators, operands = claim.items[0].chain
    is_number = (
        len(claim.items) == 1 and not set(operators) - {"="} and all(side[0] == "symbol" for side in operands[:-1])
    )
    return literal(operands[-1][1] if operands[-1][0] == "degree" else operands[-1]) if is_number else None


def canonical(answer: str) -> str:
    """Returns a key for equal answers: the exact number, or else the text without case and without repeated spaces."""
    value = number(answer)
    return str(value) if value is not None else " ".join(answer.split()).casefold()
