r"""Checks whether the equations in a text are true, in exact rational arithmetic: + - * / of numbers only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

MAX_CHARS, MAX_NUMBERS, MAX_DIGITS, MAX_DEPTH = 200, 50, 30, 20
"""Limits of one side of an equation: characters left of the `=`, numbers, digits per number, and nested parentheses and
signs. A text with more is not a side."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of an equation."""

    value: Fraction
    end: int
    """The index after it in its text."""
    is_sum: bool
    """Whether it has an operator."""
    decimals: int
    """The number of digits after the point of its last number."""


def truths(text: str) -> Iterator[bool]:
    r"""Yields whether each equation in `text` is true, in order.

    An equation is `a = b`, or a link of a chain of them, on one line. Both sides are made of numbers, `+ - * /` (also
    `× · ÷ \times \cdot \div`, and an `x` between digits) and parentheses, and at least one has an operator. An
    expression next to a variable, a power, a percent sign or a mixed number is not a side. A result with a decimal
    point may be rounded to its last digit: `10/3=3.33` is true, `10/3=3.34` is not.
    """
    for line in _normalised(text).splitlines():
        for before, after in pairwise(line.split("=")):
            left, right = _last_side(before), _first_side(after)
            if left and right and (left.is_sum or right.is_sum):
                yield _are_equal(left, right)


def _are_equal(left: Side, right: Side) -> bool:
    results = [side for side in (left, right) if not side.is_sum]
    rounding = Fraction(1, 2 * 10 ** results[0].decimals) if results and results[0].decimals else 0
    return abs(left.value - right.value) <= rounding


def _last_side(text: str) -> Side | None:
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


def _first_side(text: str) -> Side | None:
    """The side that `text` starts with."""
    side = _read(text, 0)
    return side if side and not _GOES_ON.match(text, side.end) else None


def _stands_alone(text: str, start: int) -> bool:
    """Whether the text before an expression does not belong to it."""
    before = text[:start].rstrip()
    if not before:
        return True
    last, touches = before[-1], len(before) == start
    if last in "+-*/^" or (touches and (last.isalnum() or last in "_%}!\\).,")):
        return False
    if text[start] == "-" and (last.isalnum() or last in ")}"):  # "is -3+5" is a sum, "x -3+5" is not
        return bool(_WORD.search(before[-20:])) and text[start + 1] not in " \t"
    return not (last.isdigit() and _FRACTION.match(text, start))


def _read(text: str, start: int) -> Side | None:
    """The longest expression that begins at `start`."""
    reader = _Reader(text, start)
    try:
        value = reader.sum(0)
    except (ValueError, ZeroDivisionError):
        return None
    return Side(value, reader.index, reader.num_operators > 0, reader.decimals)


class _Reader:
    """Reads an expression by recursive descent: sums of products of numbers, signs and parentheses."""

    def __init__(self, text: str, index: int) -> None:
        self.text, self.index = text, index
        self.num_numbers = self.num_operators = self.decimals = 0

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while operator := self.take("+-"):
            self.num_operators += 1
            term = self.product(depth)
            value = value + term if operator == "+" else value - term
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while operator := self.take("*/"):
            self.num_operators += 1
            factor = self.factor(depth)
            value = value * factor if operator == "*" else value / factor
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if self.take("-"):
            return -self.factor(depth + 1)
        if self.take("("):
            value = self.sum(depth + 1)
            if not self.take(")"):
                raise ValueError("a parenthesis is not closed")
            return value
        self.skip()
        match = _NUMBER.match(self.text, self.index)
        self.num_numbers += 1
        if not match or len(match[0]) > MAX_DIGITS or self.num_numbers > MAX_NUMBERS:
            raise ValueError("not a number, or too long")
        self.index = match.end()
        self.decimals = len(match[0].partition(".")[2])
        return Fraction(match[0].replace(",", ""))

    def take(self, characters: str) -> str:
        """The next character, which is then read, if it is one of `characters`; else nothing."""
        start = self.index
        self.skip()
        if self.index < len(self.text) and self.text[self.index] in characters:
            self.index += 1
            return self.text[self.index - 1]
        self.index = start
        return ""

    def skip(self) -> None:
        while self.index < len(self.text) and self.text[self.index] in " \t":
            self.index += 1


def _normalised(text: str) -> str:
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text


_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+", re.ASCII)
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
