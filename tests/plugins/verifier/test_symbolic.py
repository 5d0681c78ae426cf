"""Sympy decides where two formulas have values at too few points."""

import pytest

from grpo_lightning.plugins.verifier.comparison import compare
from grpo_lightning.plugins.verifier.grammar import parse
from grpo_lightning.plugins.verifier.reading import canonical
from grpo_lightning.plugins.verifier.symbolic import identical


@pytest.mark.parametrize(
    ("gold", "answer", "are_identical"),
    [
        ("(x+1)^2", "x^2+2x+1", True),
        (r"\sqrt{x-90}\sin(x)^2", r"\sin(x)^2\sqrt{x-90}", True),
        ("(x+1)^2", "x^2+1", False),
        (r"\lfloor x\rfloor", "x", False),  # no counterpart in sympy
    ],
)
def test_formulas_are_identical_if_their_difference_cancels(gold: str, answer: str, are_identical: bool) -> None:
    assert identical(parse(canonical(gold)), parse(canonical(answer))) is are_identical


def test_formulas_without_values_at_the_points_are_compared_by_sympy() -> None:
    # Real from x = 10^10 on, where no point lies, and complex values are huge on the way.
    gold, answer = r"\sqrt{x-10^{10}}\ln(x-10^{10})", r"\ln(x-10^{10})\sqrt{x-10^{10}}"
    assert str(compare(gold, answer)) == str(compare("1", "1"))
