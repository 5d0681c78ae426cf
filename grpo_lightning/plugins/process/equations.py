r"""Checks whether the equations in a text are true, in exact rational arithmetic: + - * / of numbers only."""

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from grpo_lightning.plugins.verifier.grammar import read_claim
from grpo_lightning.plugins.verifier.numbers import exact
from grpo_lightning.plugins.verifier.tokens import Unreadable, plain

MAX_CHARS = 200
"""Characters left of an `=` in which its side begins. The pattern limits numbers, their digits, and parentheses."""

_NUMBER = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}|[0-9]{1,30})(?![0-9])(?:\.[0-9]{1,30}(?![0-9]))?|\.[0-9]{1,30}(?![0-9]))"
_TERM = rf"(?:[-(] ?){{0,20}}{_NUMBER}(?: ?\)){{0,20}}"
_SIDE = rf"(?P<side>(?>{_TERM}(?P<more>(?: ?[-+*/] ?{_TERM}){{1,49}})?))"
_LEFT = re.compile(
    r"(?<![-+*/^])(?<![-+*/^] )(?<![\w%}!\\).,])(?!(?<=\d )\d+ ?/ ?\d)"
    rf"(?!(?<=[\w)}}] )-(?:(?<![^\W\d_]{{2}} -)| )){_SIDE} ?\Z"  # "is -3+5" is a sum, "x -3+5" is not
)
_RIGHT = re.compile(
    rf" ?{_SIDE}(?! ?[-+*/^%]|\w|[{{!(\\]|[.,]\d| \d+ ?/ ?\d| [^\W\d_](?!\w)"
    r"| (?:percent|hundred|thousand|[mb]illion|dozens?|times|plus|minus|over|divided)\b)"
)
_SPELLINGS = {
    r"\\?\$": "",
    r"\*\*": "^",
    r"\\(?:times|cdot)(?![A-Za-z])|(?<=\d)[ \t]*[xX][ \t]*(?=\d)": "*",
    r"\\div(?![A-Za-z])": "/",
    r"[ \t]+": " ",
}


def truths(text: str) -> Iterator[bool]:
    r"""Yields whether each equation in `text` is true, in order.

    An equation is `a = b`, or a link of a chain of them, on one line. Both sides are made of numbers, `+ - * /` (also
    `× · ÷ \times \cdot \div`, and an `x` between digits) and parentheses, and at least one has an operator. An
    expression next to a variable, a power, a percent sign or a mixed number is not a side. A result with a decimal
    point may be rounded to its last digit: `10/3=3.33` is true, `10/3=3.34` is not.
    """
    text = plain(text)
    for pattern, replacement in _SPELLINGS.items():
        text = re.sub(pattern, replacement, text)
    for line in text.splitlines():
        for before, after in pairwise(line.split("=")):
            left, right = _LEFT.search(before, max(len(before) - MAX_CHARS, 0)), _RIGHT.match(after)
            if left and right and (left["more"] or right["more"]):
                # A parenthesis that is open around the equation belongs to neither side.
                sides = left["side"], right["side"]
                opened, closed = (side.count("(") - side.count(")") for side in sides)
                sides = sides[0].removeprefix("(" * opened), sides[1].removesuffix(")" * -closed)
                a, b = map(_value, sides)
                result = right if left["more"] else left
                decimals = 0 if result["more"] else len(result["side"].rstrip(") ").partition(".")[2])
                if a is not None and b is not None:
                    yield abs(a - b) <= (Fraction(1, 2 * 10**decimals) if decimals else 0)


def _value(side: str) -> Fraction | None:
    side = side.replace(",", "").replace(" ", "").replace("--", "+").replace("+-", "-")  # the grammar has one sign
    try:
        return exact(read_claim(side).items[0].chain[2][0])
    except Unreadable:
        return None
