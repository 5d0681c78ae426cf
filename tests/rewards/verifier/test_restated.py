"""Answers that repeat the question, in the question's terms or in multiples of them."""

import pytest

from grpo_lightning.plugins.verifier.comparison import compare

LINE = "Solve $2x+3y=6$ for $y$."
CIRCLE = "Write $x^2+y^2-4x+6y=3$ in standard form."
STANDARD = "Write $y=2x+1$ in standard form."


@pytest.mark.parametrize("answer", ["2x+3y=6", "4x+6y=12", "6-2x=3y", "2x+3y-6=0", r"\frac{x}{3}+\frac{y}{2}=1"])
def test_a_solved_equation_is_not_answered_by_the_question(answer: str) -> None:
    assert compare(r"y=2-\frac23x", answer, LINE) == "restated"
    assert compare(r"y=2-\frac23x", r"y=\frac{6-2x}{3}", LINE) == "equal"


@pytest.mark.parametrize("answer", ["x^2+y^2-4x+6y-3=0", "2x^2+2y^2-8x+12y=6", "x^2-4x=3-6y-y^2"])
def test_a_circle_in_standard_form(answer: str) -> None:
    gold = "(x-2)^2+(y+3)^2=16"
    assert compare(gold, answer, CIRCLE) == "restated"
    assert compare(gold, "16=(y+3)^2+(x-2)^2", CIRCLE) == compare(answer, answer, CIRCLE) == "equal"


def test_sides_count_where_the_gold_answer_has_the_terms_of_the_question() -> None:
    assert compare("2x-y=-1", "2x-y+1=0", STANDARD) == compare("2x-y=-1", "y-2x=1", STANDARD) == "equal"
    assert compare("2x-y=-1", "2y=4x+2", STANDARD) == "restated"
    assert compare("3x+2y=6", r"\frac x4+\frac y6=\frac12", r"Clear $\frac x2+\frac y3=1$ of fractions.") == "restated"


@pytest.mark.parametrize(
    "answer", [r"\frac{1-x^2}{1-x}", r"\frac{2(x^2-1)}{2(x-1)}", r"\frac{x^2-1}{x-1}+0", r"\frac{(x+1)^2}{x+1}"]
)
def test_signs_and_numbers_are_no_work(answer: str) -> None:
    assert compare("x+1", answer, r"Simplify $\frac{x^2-1}{x-1}$.") != "equal"
    assert compare("x+1", "1+x", r"Simplify $\frac{x^2-1}{x-1}$.") == "equal"


def test_what_is_longer_than_the_gold_answer_and_equal_to_what_is_asked() -> None:
    question = r"Simplify $\frac{1}{\cos^2x}-\sin^2x-\cos^2x$."
    half_way = r"\frac{1}{\cos^2x}-1"
    assert compare(r"\tan^2x", half_way, question) == "restated"
    assert compare(r"\tan^2x", r"\sec^2x-1", question) == "equal"
    assert compare(r"\tan^2x", half_way, "What is the derivative of $\\tan x-x$?") == "equal"
    assert compare("(x+1)^3", "x^3+3x^2+3x+1", "Simplify $(x+1)(x^2+2x+1)$.") == "equal"


@pytest.mark.parametrize(
    ("gold", "answer", "question"),
    [
        ("(x+1)(x+2)", "-(-x^2-3x-2)", "Factor $x^2+3x+2$."),
        (r"4.5\times10^4", r"45000\times10^0", "Write 45000 in scientific notation."),
        ("2^{10}", "1024", "Write 1024 as a power of 2."),
    ],
)
def test_a_form_is_asked_for(gold: str, answer: str, question: str) -> None:
    assert compare(gold, answer, question) != "equal"
    assert compare(gold, gold, question) == "equal"


@pytest.mark.parametrize(
    ("gold", "answer", "question"),
    [
        ("-4(x-2)(x+2)", "4(2-x)(x+2)", "Factor $16-4x^2$."),
        ("(x+3)^2", "(x+3)(x+3)", "Factor $x^2+6x+9$."),
    ],
)
def test_other_forms_are_right_where_none_is_asked_for(gold: str, answer: str, question: str) -> None:
    assert compare(gold, answer, question) == "equal"


def test_lists_have_no_order_and_their_numbers_may_stand_in_the_question() -> None:
    assert compare("1, 2", "2, 1", "Solve $x^2-3x+2=0$ for 1 and 2.") == "equal"
    assert compare(r"\{1,2\}", r"\{2,1\}", "Solve $x^2-3x+2=0$ for 1 and 2.") == "equal"


@pytest.mark.parametrize(
    ("gold", "answer", "question"),
    [
        ("83", r"\frac{1245}{15}", "Boxes of 15 pounds on a bridge for 5000."),
        ("7", r"\frac{84}{12}", "How many dozens of eggs will she eat?"),
        ("100", "10^2", "A square has side 10."),
        (r"\frac34", r"\frac{12}{16}", r"Reduce $\frac{6}{8}$ to lowest terms."),
        ("2^{12}", "8^4", "Write $(2^3)^4$ as a power of 2."),
    ],
)
def test_the_last_step_is_left_to_do(gold: str, answer: str, question: str) -> None:
    assert compare(gold, answer, question) != "equal"
    assert compare(gold, answer) == "equal" or r"\frac" not in gold + answer
    assert compare(gold, gold, question) == "equal"
