"""Rewards that score segments, from `score` to the advantages of tokens."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.fast import fit
from helpers.fitting import Digits, Steps
from helpers.tiny import prompts_of

from grpo_lightning import FinishReason, ProcessSupervision, Reward, RewardResult, Sample, Segment, UsageError


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


class Halves(Digits):
    """Two segments: the first half of the tokens scores by the parity of their sum, all of them by whether they end."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        result = super().score(samples)
        result.segments = []
        for one in samples:
            half, last = (len(one.token_ids) - 1) // 2, len(one.token_ids) - 1
            first = [Segment(half, float(sum(one.token_ids[: half + 1]) % 2))] if half < last else []
            result.segments.append([*first, Segment(last, float(not one.truncated))])
        return result


def test_process_supervision_in_a_run(tmp_path: Path):
    seen, advantage = Steps(), ProcessSupervision(advantage_eps=0)
    fit(tmp_path, [seen], trainer={"max_epochs": 1}, rewards=[Halves()], advantage=advantage)
    (exploration,) = seen.explorations
    samples, found = exploration.samples, exploration.rollouts.advantage
    expected: list[float] = []
    segments = Halves().score(samples).segments
    assert segments is not None
    for first in range(0, len(samples), 4):
        rewards = [segment.value for own in segments[first : first + 4] for segment in own]
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for one, own in zip(samples[first : first + 4], segments[first : first + 4], strict=True):
            for place in range(len(one.token_ids)):
                left = [(segment.value - mean) / std for segment in own if segment.end >= place]
                expected.append(math.fsum(left) if std else 0.0)
    assert len(set(expected)) > 4
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_process_supervision_without_segments_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="no reward scores segments"):
        fit(tmp_path, trainer={"max_epochs": 1}, advantage=ProcessSupervision())
