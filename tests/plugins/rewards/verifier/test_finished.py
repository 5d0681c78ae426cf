"""Operations that an answer may leave; `readings.jsonl` has the operations that values leave."""

import pytest

from grpo_lightning.plugins.rewards.verifier.value_comparison import compare

GIVEN = "Three numbers are 3, 4 and 12."


@pytest.mark.parametrize(
    ("gold", "answer"), [(r"100\pi", r"\frac{200\pi}{2}"), (r"16\pi", r"4^2\pi"), ("x^2+1", r"\frac{x^3+x}{x}")]
)
def test_tidying_may_be_left_where_no_question_gave_the_numbers(gold: str, answer: str) -> None:
    assert compare(gold, answer) == compare(gold, answer, "q") == "equal"
    assert compare(gold, answer, GIVEN) != "equal"
    assert compare(gold, answer, GIVEN, {"finished": False}) == "equal"
    assert compare(answer, answer, GIVEN) == "equal"
