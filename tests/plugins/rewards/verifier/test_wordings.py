"""Answers in words: numbers, sentences, choices, units; `cases.jsonl` has more of each, with wrong twins."""

from fractions import Fraction

import pytest

from grpo_lightning.plugins.rewards.verifier.numbers import exact
from grpo_lightning.plugins.rewards.verifier.question import choices_in, words_of
from grpo_lightning.plugins.rewards.verifier.sentences import read_sentence
from grpo_lightning.plugins.rewards.verifier.units import UNITS, conversion
from grpo_lightning.plugins.rewards.verifier.words import changes

QUESTION = (
    "Tom picks 12 apples in 4 weeks and Jane's 7 ducks eat some. How many more does he pick than Jane in 4 weeks?"
)


SENTENCES = [
    ("Tom picks 5 more apples than Jane", 5), ("So he picks 5 in 4 weeks", 5), ("Tom picks 12 - 7 = 5 more", 5),
    ("12 apples - 7 apples = 5 apples", 5), (r"\text{Tom picks 5 more}", 5), ("5 (12 apples - 7)", 5),
    ("12 (5 apples and 7 ducks)", 12), ("84: 7 ducks in each of 12 weeks", 84), ("about 5", 5), ("Tom picks five", 5),
    ("Tom picks a dozen", 12),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SENTENCES)
def test_one_number_in_a_sentence(text, value):
    claim = read_sentence(text, words_of(QUESTION), QUESTION)
    assert claim is not None
    assert exact(claim.items[0].value) == value


@pytest.mark.parametrize("word", ["not", "or", "maybe", "almost", "twice", "guess", "unless", "wrong", "least", "half"])
def test_what_takes_a_value_back_is_never_allowed(word):
    text = f"Tom {word} 5 apples"
    assert read_sentence(text, frozenset()) is None
    assert not changes(["apples", "picked", "zork"])


@pytest.mark.parametrize(
    ("question", "choices"),
    [
        ("What is it? (A) 3 (B) 5, (C) 6", {"A": "3", "B": "5", "C": "6"}),
        (
            r"Which? $\textbf{(A)}\ \frac12\qquad\textbf{(B)}\ 5\qquad\textbf{(C)}\ x^2$",
            {"A": r"\frac12", "B": "5", "C": "x^2"},
        ),
        ("Who?\nA. Tom\nB. Jane\n\nGive the letter.", {"A": "Tom", "B": "Jane"}),
        ("Who?\nA) Tom\nB) Jane", {"A": "Tom", "B": "Jane"}),
        ("In triangle (A) and (C)", {}),
        ("Let A. be a set.", {}),
        ("", {}),
    ],
)
def test_choices_of_a_question(question, choices):
    assert choices_in(question) == choices


def test_units_convert():
    def unit(*names):
        return tuple(sorted((UNITS[name], 1) for name in names))

    assert conversion(unit("hours"), unit("min")) == 60
    assert conversion(unit("inches"), unit("ft")) == Fraction(1, 12)
    assert conversion(unit("hours"), unit("dollars")) is None
