import pytest
import torch
from helpers.tiny import prompts_of

from grpo_lightning.plugins.verifier.control import LastNumber
from grpo_lightning.rewards.base import Run
from grpo_lightning.rewards.length import CosineLength
from grpo_lightning.rewards.overlong import OverlongPenalty
from grpo_lightning.types import FinishReason, Sample, UsageError


def penalty(length: int, **kwargs) -> float:
    sample = Sample(prompts_of([3])[0], "", [7] * length, FinishReason.STOP)
    result = OverlongPenalty(**kwargs)([sample])
    assert result.status == ["ok"]
    return result.value[0]


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (30, -1)])
def test_numbers_of_dapos_eq_13(length, expected):
    # L_max 20, L_cache 4: 0 up to 16, then (16 - |o|) / 4, and -1 from 20 on.
    assert penalty(length, max_length=20, cache=4) == expected


@pytest.mark.parametrize("cache", [0, 21])
def test_a_cache_out_of_range_is_refused(cache):
    with pytest.raises(UsageError, match=f"cache={cache}"):
        OverlongPenalty(max_length=20, cache=cache)


RUN = Run(torch.device("cpu"), tokenizer=None, max_new_tokens=30)


def of_lengths(*lengths: int, text: str = "1") -> list[Sample]:
    return [Sample(prompts_of([3])[0], text, [7] * length, FinishReason.STOP) for length in lengths]


def test_its_lengths_are_by_default_the_runs():
    reward = OverlongPenalty()
    reward.setup(RUN)
    # A fifth of 30 is 6: 0 up to 24, then (24 - |o|) / 6.
    assert reward(of_lengths(24, 27, 30)).value == [0, -0.5, -1]
    explicit = OverlongPenalty(max_length=20, cache=4)
    explicit.setup(RUN)
    assert explicit(of_lengths(16, 18, 20)).value == [0, -0.5, -1]
    half = OverlongPenalty(cache=15)
    half.setup(RUN)
    assert half(of_lengths(15, 18)).value == [0, -0.2]


def test_a_cache_longer_than_the_run_allows_is_refused():
    with pytest.raises(UsageError, match="cache=31 of OverlongPenalty: give 1 to max_length=30"):
        OverlongPenalty(cache=31).setup(RUN)


def test_the_cosines_length_is_by_default_the_runs():
    reward = CosineLength(LastNumber(), right_short=1.0, right_long=0.0)
    reward.setup(RUN)
    assert reward(of_lengths(0, 10, 15, 30)).value == [1, pytest.approx(0.75), pytest.approx(0.5), 0]  # cos(π/3) = 1/2
    explicit = CosineLength(LastNumber(), max_length=20, right_long=0.0)
    explicit.setup(RUN)
    assert explicit(of_lengths(10)).value == [pytest.approx(0.5)]


def test_without_a_run_and_a_length_it_says_what_is_missing():
    reward = OverlongPenalty()
    assert reward(of_lengths(5)).status == ["error"]
    assert "give max_length, or call setup(run)" in reward.tally.examples["error"]
