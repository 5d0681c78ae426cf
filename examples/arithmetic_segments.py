"""A scorer of segments without a model: whether their equations are true, in exact rational arithmetic."""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from grpo_lightning import Question, Sample, SegmentScorer, UsageError
from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer
from grpo_lightning.plugins.rewards.verifier.grammar import read_claim
from grpo_lightning.plugins.rewards.verifier.numbers import exact
from grpo_lightning.plugins.rewards.verifier.reading import number
from grpo_lightning.plugins.rewards.verifier.tokens import Unreadable, plain


class ArithmeticSegments(SegmentScorer):
    """1 for a segment whose equations are all true, 0 for a segment with a false equation.

    A process reward without a model, for arithmetic; `truths` defines what counts as an equation. It checks
    that equations are true, not that they are relevant: `1+1=2` is a right segment of any solution.

    Args:
        no_equation: Value of a segment without an equation. Above 0 it pays for prose. With `reduce: min`, 0 makes
            every completion with such a segment worth 0.
        check_answer: Judge the last segment by the final answer too: it is right if that equals the gold answer and
            the segment has no false equation. The process reward can then decide what is right without a verifier.
    """

    def __init__(self, no_equation: float = 0.0, check_answer: bool = False) -> None:
        self.no_equation = no_equation
        self.check_answer = check_answer

    def read_questions(self, questions: Sequence[Question]) -> None:
        """With `check_answer`, refuses a gold answer that is not a number."""
        bad = [question for question in questions if self.check_answer and number(question.answer) is None]
        if bad:
            raise UsageError(
                f"check_answer of ArithmeticSegments: the gold answer {bad[0].answer[:80]!r} of "
                f"{bad[0].source or 'a question'} is not a number; set check_answer=false and give MathVerifier too"
            )

    def score(self, samples: Sequence[Sample], segments: Sequence[Sequence[str]]) -> list[list[float]]:
        """1, 0 or `no_equation` for each segment."""
        values = []
        for sample, texts in zip(samples, segments, strict=True):
            truths_by_segment = [[*truths(text)] for text in texts]
            values.append([float(all(true)) if true else self.no_equation for true in truths_by_segment])
            if self.check_answer:
                gold = number(sample.answer)
                is_right = gold is not None and gold == number(extract_answer(sample.whole_turn) or "")
                values[-1][-1] = float(is_right and all(truths_by_segment[-1]))
        return values


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
