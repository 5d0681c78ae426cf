"""Rewards that score segments, from `score` to the advantages of tokens."""

import math
from collections.abc import Sequence

import pytest
from helpers.tiny import prompts_of

from grpo_lightning import FinishReason, Reward, RewardResult, Sample, Segment


class Scripted(Reward):
    """What a test says of each sample's segments; its length stands for the sample."""

    def __init__(self, segments: dict[int, list[Segment]], breaks_on: int = 0) -> None:
        super().__init__()
        self.segments = segments
        self.breaks_on = breaks_on

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        lengths = [len(sample.token_ids) for sample in samples]
        if self.breaks_on in lengths:
            raise RuntimeError("broken")
        return RewardResult([0.0] * len(samples), ["ok"] * len(samples), segments=[self.segments[n] for n in lengths])


def sample(length: int) -> Sample:
    return Sample(prompts_of([3])[0], "", [7] * length, FinishReason.STOP)


def test_segments_survive_a_failure_of_another_sample():
    segments = {2: [Segment(1, 0.5)], 4: [Segment(0, 1.0), Segment(3, -1.0)]}
    result = Scripted(segments, breaks_on=3)([sample(2), sample(3), sample(4)])
    assert result.status == ["ok", "error", "ok"]
    assert result.segments == [segments[2], [], segments[4]]
    assert math.isnan(result.value[1])


@pytest.mark.parametrize("ends", [[2], [-1], [1, 0], [1, 1]])
def test_segments_that_do_not_fit_the_completion_are_an_error_of_the_sample(ends):
    result = Scripted({2: [Segment(end, 1.0) for end in ends]})([sample(2)])
    assert result.status == ["error"]
    assert math.isnan(result.value[0])
