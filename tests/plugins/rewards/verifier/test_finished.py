"""What is left to do in a value and may be left where the gold answer leaves it; what complex values decide."""

import pytest

from grpo_lightning.plugins.rewards.verifier.finished import num_terms, unfinished
from grpo_lightning.plugins.rewards.verifier.grammar import read_claim
from grpo_lightning.plugins.rewards.verifier.value_comparison import compare

GIVEN = "Three numbers are 3, 4 and 12."


def tree(text: str):
    return read_claim(text).items[0].value


@pytest.mark.parametrize("text", ["12^2", "2^{-2}", r"\frac{1}{2^{10}}", r"\frac{3^6}{3}", "-6^2"])
def test_a_number_is_written_out(text: str) -> None:
    assert "power in a number" in unfinished(tree(text))


@pytest.mark.parametrize("text", ["144", r"\frac{6}{3}", "10^4", r"3\cdot10^4", "2^{20}", r"\frac{1}{10^4}"])
def test_a_finished_number(text: str) -> None:
    assert unfinished(tree(text)) <= {"last step", "reduction"}


def test_a_gold_power_may_be_answered_by_a_power() -> None:
    assert compare("3^5", "3^5", GIVEN) == compare("3^5", "243", GIVEN) == compare("4^6", "2^{12}", GIVEN) == "equal"
    assert compare(r"\frac{3^6}{3}", "3^5", GIVEN) == "equal"


@pytest.mark.parametrize(
    ("gold", "answer"), [(r"100\pi", r"\frac{200\pi}{2}"), (r"16\pi", r"4^2\pi"), ("x^2+1", r"\frac{x^3+x}{x}")]
)
def test_tidying_may_be_left_where_no_question_gave_the_numbers(gold: str, answer: str) -> None:
    assert compare(gold, answer) == compare(gold, answer, "q") == "equal"
    assert compare(gold, answer, GIVEN) != "equal"
    assert compare(gold, answer, GIVEN, {"finished": False}) == "equal"
    assert compare(answer, answer, GIVEN) == "equal"


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"\sqrt{x-10^{12}}", r"(x-10^{12})^{1/2}", "equal"),
        (r"\sqrt{x-10^{12}}", r"(x-10^{11})^{1/2}", "different"),
        (r"\ln(x-10^{9})+\ln(x-10^9)", r"2\ln(x-10^9)", "equal"),
        (r"\ln(x-10^{9})+\ln(x-10^9)", r"3\ln(x-10^9)", "different"),
        (r"\sqrt{-(x-y)^2}", r"\sqrt{-(y-x)^2}", "equal"),
        (r"\sqrt{-(x-y)^2}", r"\sqrt{-x^2-2xy-y^2}", "different"),
        (r"\sqrt{-1-x^2-y^2}", r"\sqrt{-(1+x^2+y^2)}", "equal"),
    ],
)
def test_where_there_are_no_real_points_complex_ones_decide(gold: str, answer: str, verdict: str) -> None:
    assert compare(gold, answer) == verdict


def test_a_constant_has_no_more_terms_than_the_gold_one() -> None:
    assert [num_terms(tree(text)) for text in (r"8\sqrt2", r"\ln10-\ln2", r"2(1+\sqrt2)", "0-2i")] == [1, 2, 2, 1]
    assert compare(r"\ln5", r"\ln10-\ln2") == "different"
