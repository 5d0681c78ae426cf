r"""Checks whether the equations in a text are true, in exact rational arithmetic: + - * / of numbers only."""

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from operator import add, mul, sub, truediv

MAX_CHARS, MAX_NUMBERS, MAX_DIGITS, MAX_DEPTH = 200, 50, 30, 20
"""Limits of one side of an equation: characters left of the `=`, numbers, digits per number, and nested parentheses and
signs. A text with more is not a side."""

OPERATIONS = {"+": add, "-": sub, "*": mul, "/": truediv}


def truths(text: str) -> Iterator[bool]:
    r"""Yields whether each equation in `text` is true, in order.

    An equation is `a = b`, or a link of a chain of them, on one line. Both sides are made of numbers, `+ - * /` (also
    `× · ÷ \times \cdot \div`, and an `x` between digits) and parentheses, and at least one has an operator. An
    expression next to a variable, a power, a percent sign or a mixed number is not a side. A result with a decimal
    point may be rounded to its last digit: `10/3=3.33` is true, `10/3=3.34` is not.
    """
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    for line in text.splitlines():
        for before, after in pairwise(line.split("=")):
            left, right = _last_side(before), _first_side(after)
            if left and right and (left.num_operators or right.num_operators):
                result = right if left.num_operators else left
                decimals = 0 if result.num_operators else result.decimals
                rounding = Fraction(1, 2 * 10**decimals) if decimals else 0
                yield abs(left.value - right.value) <= rounding


def _last_side(text: str) -> "_Side | None":
    """The side that `text` ends with: the longest that does not belong to the text before it."""
    first = len(text)
    while first and len(text) - first < MAX_CHARS and text[first - 1] in "0123456789 \t.,()+-*/":
        first -= 1
    for start in range(first, len(text)):
        if text[start] in "0123456789.(-" and _stands_alone(text, start):
            side = _read(text, start)
            if side and not text[side.end :].strip():
                return side
    return None


def _first_side(text: str) -> "_Side | None":
    """The side that `text` starts with."""
    side = _read(text, 0)
    return side if side and not _GOES_ON.match(text, side.end) else None


def _stands_alone(text: str, start: int) -> bool:
    """True where the text before an expression does not belong to it."""
    before = text[:start].rstrip()
    if not before:
        return True
    last, touches = before[-1], len(before) == start
    if last in "+-*/^" or (touches and (last.isalnum() or last in "_%}!\\).,")):
        return False
    if text[start] == "-" and (last.isalnum() or last in ")}"):  # "is -3+5" is a sum, "x -3+5" is not
        return bool(_WORD.search(before[-20:])) and text[start + 1] not in " \t"
    return not (last.isdigit() and _FRACTION.match(text, start))


def _read(text: str, start: int) -> "_Side | None":
    """The longest side that begins at `start`."""
    try:
        return _Side(text, start)
    except (ValueError, ZeroDivisionError):
        return None


class _Side:
    """One side of an equation, read by recursive descent: sums of products of numbers, signs and parentheses."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.end = start
        """The index after it in its text."""
        self.num_numbers = self.num_operators = 0
        self.decimals = 0
        """The number of digits after the point of its last number."""
        self.value = self.chain(0)

    def chain(self, depth: int, operators: str = "+-") -> Fraction:
        """A sum; with the operators `*/` a product."""
        value = None
        while value is None or (operator := self.take(operators)):
            operand = self.chain(depth, "*/") if operators == "+-" else self.factor(depth)
            self.num_operators += value is not None
            value = operand if value is None else OPERATIONS[operator](value, operand)
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if self.take("-"):
            return -self.factor(depth + 1)
        if self.take("("):
            value = self.chain(depth + 1)
            if not self.take(")"):
                raise ValueError("a parenthesis is not closed")
            return value
        match = _NUMBER.match(self.text, self.end)
        self.num_numbers += 1
        if not match or len(match[1]) > MAX_DIGITS or self.num_numbers > MAX_NUMBERS:
            raise ValueError("not a number, or too long")
        self.end = match.end()
        self.decimals = len(match[1].partition(".")[2])
        return Fraction(match[1].replace(",", ""))

    def take(self, characters: str) -> str:
        """The next character, which is then read, if it is one of `characters`; else nothing."""
        match = _MARK.match(self.text, self.end)
        if not match or match[1] not in characters:
            return ""
        self.end = match.end()
        return match[1]


_MARK = re.compile(r"[ \t]*([-+*/()])")
_NUMBER = re.compile(r"[ \t]*((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
_WORD = re.compile(r"[^\W\d_]{2}\Z")
_FRACTION = re.compile(r"\d+[ \t]*/[ \t]*\d", re.ASCII)
_GOES_ON = re.compile(
    r"[ \t]*[-+*/^%]|\w|[{!(\\]|[.,]\d|[ \t]+\d+[ \t]*/[ \t]*\d|[ \t]+[^\W\d_](?!\w)"
    r"|[ \t]+(?:percent|hundred|thousand|[mb]illion|dozens?|times|plus|minus|over|divided)\b"
)
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\?\$", ""),
        (r"[−–]", "-"),
        (r"\*\*", "^"),
        (r"[×·⋅]|\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"(?<=\d)[ \t]*[xX][ \t]*(?=\d)", "*"),
        (r"÷|\\div(?![A-Za-z])", "/"),
    )
]
