"""Words and units; `readings.jsonl` and `cases.jsonl` have more of each, with wrong twins."""

from fractions import Fraction

import pytest

from grpo_lightning.plugins.rewards.verifier.sentences import read_sentence
from grpo_lightning.plugins.rewards.verifier.units import UNITS, conversion
from grpo_lightning.plugins.rewards.verifier.words import changes


@pytest.mark.parametrize("word", ["not", "or", "maybe", "almost", "twice", "guess", "unless", "wrong", "least", "half"])
def test_what_takes_a_value_back_is_never_allowed(word):
    text = f"Tom {word} 5 apples"
    assert read_sentence(text, frozenset()) is None
    assert not changes(["apples", "picked", "zork"])


def test_units_convert():
    def unit(*names):
        return tuple(sorted((UNITS[name], 1) for name in names))

    assert conversion(unit("hours"), unit("min")) == 60
    assert conversion(unit("inches"), unit("ft")) == Fraction(1, 12)
    assert conversion(unit("hours"), unit("dollars")) is None
