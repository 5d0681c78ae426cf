"""Sympy decides where two formulas have values at too few points."""

from fractions import Fraction

from grpo_lightning.plugins.rewards.verifier.grammar import Node
from grpo_lightning.plugins.rewards.verifier.symbolic import identical
from grpo_lightning.plugins.rewards.verifier.value_comparison import compare

X: Node = ("symbol", "x")
ONE: Node = ("number", Fraction(1), None)
TWO: Node = ("number", Fraction(2), None)
SINE: Node = ("call", "sin", X)


def test_formulas_are_identical_if_their_difference_cancels() -> None:
    square: Node = ("pow", ("add", X, ONE), TWO)
    expanded: Node = ("add", ("pow", X, TWO), ("add", ("mul", TWO, X), ONE))
    assert identical(square, expanded)
    assert identical(("mul", square, SINE), ("mul", SINE, expanded))
    assert not identical(square, ("add", ("pow", X, TWO), ONE))


def test_a_part_that_sympy_lacks_is_identical_to_nothing() -> None:
    assert not identical(("floor", X), ("floor", X))


def test_formulas_without_values_at_the_points_are_compared_by_sympy() -> None:
    # Real from x = 10^10 on, where no point lies, and complex values are huge on the way.
    gold, answer = r"\sqrt{x-10^{10}}\ln(x-10^{10})", r"\ln(x-10^{10})\sqrt{x-10^{10}}"
    assert compare(gold, answer) == compare("1", "1")
