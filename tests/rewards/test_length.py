"""Rewards for length."""

import math

import pytest
from helpers.tiny import prompts_of

from grpo_lightning.plugins.verifier.math_verifier import MathVerifier
from grpo_lightning.rewards.length import CosineLength, LengthReward
from grpo_lightning.types import FinishReason, Sample, UsageError


def sample(length: int, text: str = "", truncated: bool = False) -> Sample:
    """Its gold answer is 1."""
    return Sample(prompts_of([3])[0], text, [7] * length, FinishReason.LENGTH if truncated else FinishReason.STOP)


@pytest.mark.parametrize(("length", "expected"), [(10, 0), (12, -0.2), (5, -0.5), (1, -0.9), (20, -1), (99, -1)])
def test_distance_from_the_target(length, expected):
    result = LengthReward(target=10)([sample(length)])
    assert result.value == [pytest.approx(expected)]
    assert result.status == ["ok"]


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [
        (0, 2.0, -10.0),
        (5, 1 + (1 + math.sqrt(0.5)) / 2, -5 - 5 * math.sqrt(0.5)),  # cos(π/4)
        (10, 1.5, -5.0),
        (20, 1.0, 0.0),
        (30, 1.0, 0.0),
    ],
)
def test_cosine_length_has_the_values_of_the_paper(length, right, wrong):
    reward = CosineLength(MathVerifier(), 20, right_short=2, right_long=1, wrong_short=-10, wrong_long=0)
    result = reward([sample(length, "#### 1"), sample(length, "#### 2"), sample(length, "?")])
    assert result.value == [pytest.approx(right), pytest.approx(wrong), pytest.approx(wrong)]
    assert result.status == ["ok", "ok", "no_answer"]
    assert result.answer == ["1", "2", None]
    reward.close()


def test_a_truncated_completion_has_its_own_value():
    samples = [sample(10, "#### 1", truncated=True), sample(10, "#### 1")]
    assert CosineLength(MathVerifier(), 20)(samples).value == [0.75, 0.75]
    assert CosineLength(MathVerifier(), 20, truncated=-1.0)(samples).value == [-1.0, 0.75]


def test_a_failed_verdict_has_no_length():
    bad_gold = sample(10, "#### 1")
    bad_gold.prompt.question.answer = "\\frac{"
    result = CosineLength(MathVerifier(), 20, truncated=-1.0)([bad_gold])
    assert result.status == ["gold_bad"]
    assert math.isnan(result.value[0])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LengthReward(0), "target=0"),
        (lambda: CosineLength(MathVerifier(), 0), "max_length=0"),
        (lambda: CosineLength(MathVerifier(weight=0.5), 9), "verifier.weight=0.5"),
    ],
)
def test_a_length_below_1_and_a_weighted_verifier_are_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()
