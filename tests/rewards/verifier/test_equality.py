"""Which points decide, and which letter is a constant of integration: the gold answer and the question say it."""

import pytest

from grpo_lightning.plugins.verifier.comparison import compare


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("|x|", "x(-1)^{2x}"),
        ("x", r"\gcd(x,x)"),
        ("n", r"\lfloor n\rfloor"),
        ("n", r"\lfloor n+\frac12\rfloor"),
        ("|n|", r"\gcd(n,2n)"),
    ],
)
def test_an_answer_cannot_choose_the_points(gold: str, answer: str) -> None:
    assert compare(gold, answer) == "different"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("(-1)^n|n|", "(-1)^n n"), ("(-1)^n n", r"(-1)^n\min(n,80)"), (r"(-1)^n\lfloor n/500\rfloor", "0(-1)^n")],
)
def test_integers_are_negative_and_large_too(gold: str, answer: str) -> None:
    assert compare(gold, answer) == "different"


def test_the_gold_answer_or_the_question_speaks_of_integers() -> None:
    assert compare(r"\cos(n\pi)", "(-1)^n") == "equal"
    assert compare(r"\lfloor\frac{n}{2}\rfloor", r"\frac{2n-1+(-1)^n}{4}") == "equal"
    assert compare("n", "n(-1)^{2n}", "Find $f(n)$.") == "different"
    assert compare("n", "n(-1)^{2n}", "Let $n$ be an integer. Find $f(n)$.") == "equal"
    assert compare(r"\frac{n!}{(n-2)!}", "n(n-1)", "Let $n$ be an integer.") == "equal"


def test_a_letter_of_the_question_is_no_constant_of_integration() -> None:
    assert compare("2A+C", "2A+C+5", "How many legs have $A$ ants and $C$ cats?") == "different"
    assert compare("C+273", "C+274") == "different"
    assert compare("x^2+C", "x^2+C+5", "Find $\\int 2x\\,dx$, where $C$ is a constant.") == "equal"
    assert compare("x^2+C", "x^2+K", "Find all functions with $f'(x)=2x$.") == "equal"
