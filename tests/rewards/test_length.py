"""Rewards for length."""

import math
from collections.abc import Sequence

import pytest
import torch
from helpers.fitting import Exact
from helpers.tiny import prompts_of

from grpo_lightning import FinishReason, Reward, RewardResult, Run, Sample, UsageError
from grpo_lightning.rewards.length import CosineLength, OverlongPenalty


def sample(length: int, text: str = "", truncated: bool = False) -> Sample:
    """Its gold answer is 1."""
    return Sample(prompts_of([3])[0], text, [7] * length, FinishReason.LENGTH if truncated else FinishReason.STOP)


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
    reward = CosineLength(Exact(), 20, right_short=2, right_long=1, wrong_short=-10, wrong_long=0)
    result = reward([sample(length, "#### 1"), sample(length, "#### 2"), sample(length, "?")])
    assert result.value == [pytest.approx(right), pytest.approx(wrong), pytest.approx(wrong)]
    assert result.status == ["ok", "ok", "no_answer"]
    assert result.answer == ["1", "2", None]
    reward.close()


def test_a_truncated_completion_has_its_own_value():
    samples = [sample(10, "#### 1", truncated=True), sample(10, "#### 1")]
    assert CosineLength(Exact(), 20)(samples).value == [0.75, 0.75]
    assert CosineLength(Exact(), 20, truncated=-1.0)(samples).value == [-1.0, 0.75]


def test_a_failed_verdict_has_no_length():
    bad_gold = sample(10, "#### 1")
    bad_gold.prompt.question.answer = "\\frac{"
    result = CosineLength(Exact(), 20, truncated=-1.0)([bad_gold])
    assert result.status == ["gold_bad"]
    assert math.isnan(result.value[0])


def penalty(length: int, **kwargs) -> float:
    result = OverlongPenalty(**kwargs)([sample(length)])
    assert result.status == ["ok"]
    return result.value[0]


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (30, -1)])
def test_numbers_of_dapos_eq_13(length, expected):
    # L_max 20, L_cache 4: 0 up to 16, then (16 - |o|) / 4, and -1 from 20 on.
    assert penalty(length, max_length=20, cache=4) == expected


def samples(*lengths: int) -> list[Sample]:
    return [sample(length, "1") for length in lengths]


RUN = Run(torch.device("cpu"), tokenizer=None, max_new_tokens=30)


def test_its_lengths_are_by_default_the_runs():
    reward = OverlongPenalty()
    reward.setup(RUN)
    # A fifth of 30 is 6: 0 up to 24, then (24 - |o|) / 6.
    assert reward(samples(24, 27, 30)).value == [0, -0.5, -1]
    explicit = OverlongPenalty(max_length=20, cache=4)
    explicit.setup(RUN)
    assert explicit(samples(16, 18, 20)).value == [0, -0.5, -1]
    half = OverlongPenalty(cache=15)
    half.setup(RUN)
    assert half(samples(15, 18)).value == [0, -0.2]


def test_a_cache_longer_than_the_run_allows_is_refused():
    with pytest.raises(UsageError, match="cache=31, max_length=30 of OverlongPenalty: give 31 or more"):
        OverlongPenalty(cache=31).setup(RUN)


class Always(Reward):
    """Finds everything right."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([1.0] * len(samples))


def test_the_cosines_length_is_by_default_the_runs():
    reward = CosineLength(Always(), right_short=1.0, right_long=0.0)
    reward.setup(RUN)
    assert reward(samples(0, 10, 15, 30)).value == [1, pytest.approx(0.75), pytest.approx(0.5), 0]  # cos(π/3) = 1/2
    explicit = CosineLength(Always(), max_length=20, right_long=0.0)
    explicit.setup(RUN)
    assert explicit(samples(10)).value == [pytest.approx(0.5)]


def test_without_a_run_and_a_length_it_says_what_is_missing():
    reward = OverlongPenalty()
    assert reward(samples(5)).status == ["error"]
    assert "give max_length, or call setup(run)" in reward.tally.examples["error"]
