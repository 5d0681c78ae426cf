"""The scorer of examples/process_reward: equations in a text, each judged by hand, and the answer."""

import pytest

from examples.arithmetic_segments import ArithmeticSegments, truths
from grpo_lightning import FinishReason, Prompt, Question, Sample, UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7+5=12 4+8+1=14", [True, False]),
        ("3+4=7=14/2", [True, True]),
        ("-(47-7)=-40 = 2*-20", [True, True]),
        ("Step 1: 3 × 4 = 12 apples, $5 + $3 = $8.", [True, True]),
        (r"<think>1,000 + 2 = 1,002, 3 \times 4 = 12 \div 1</think>", [True, True]),
        ("10/3=3.33, 10/3=3.34, 10/3=3", [True, False, False]),  # a result may be rounded to its last digit
        ("5=5, x + 2 = 5, x -3+5=2, 2^3=8+0, 50%*2=1, 7/2 = 3 1/2, 3+4==7, 1/0=1, so -=3+4", []),
        ("+".join(["1"] * 51) + "=51", []),
        ("(" * 10**5 + "=1" + "=" * 10**5, []),
    ],
)
def test_equations_are_found_and_decided(text: str, expected: list[bool]) -> None:
    assert list(truths(text)) == expected


def score(scorer: ArithmeticSegments, *segments: str) -> list[float]:
    question = Question("q", "132")
    sample = Sample(Prompt(0, "q", [1], question), "".join(segments), [1], FinishReason.STOP)
    return scorer.score([sample], [segments])[0]


def test_a_segment_is_right_if_its_equations_are_true() -> None:
    segments = "<think>7+5=12 ", "4+8+1=14</think>", "<answer>132</answer>"
    assert score(ArithmeticSegments(no_equation=0.5), *segments) == [1, 0, 0.5]
    scorer = ArithmeticSegments(check_answer=True)
    assert score(scorer, *segments) == [1, 0, 1]
    assert score(scorer, "7+5=12 ", "<answer>133</answer>") == [1, 0]
    assert score(scorer, "7+5=12 ", "1+1=3 so the answer is 132") == [1, 0]
    scorer.read_questions([Question("q", "12")])
    with pytest.raises(UsageError, match=r"'x\+1' of rows:3"):
        scorer.read_questions([Question("q", "x+1", "rows:3")])
