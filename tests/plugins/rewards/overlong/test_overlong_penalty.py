"""The overlong penalty."""

import pytest
import torch
from helpers.tiny import prompts_of

from grpo_lightning import FinishReason, Run, Sample, UsageError
from grpo_lightning.plugins.rewards.overlong.overlong_penalty import OverlongPenalty


def sample(length: int) -> Sample:
    return Sample(prompts_of([3])[0], "1", [7] * length, FinishReason.STOP)


def penalty(length: int, **kwargs) -> float:
    result = OverlongPenalty(**kwargs)([sample(length)])
    assert result.status == ["ok"]
    return result.value[0]


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (30, -1)])
def test_numbers_of_dapos_eq_13(length, expected):
    # L_max 20, L_cache 4: 0 up to 16, then (16 - |o|) / 4, and -1 from 20 on.
    assert penalty(length, max_length=20, cache=4) == expected


def samples(*lengths: int) -> list[Sample]:
    return [sample(length) for length in lengths]


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


def test_without_a_run_and_a_length_it_says_what_is_missing():
    reward = OverlongPenalty()
    assert reward(samples(5)).status == ["error"]
    assert "give max_length, or call setup(run)" in reward.tally.examples["error"]
