"""The reward that an environment gives."""

from collections.abc import Sequence

from grpo_lightning.rewards.results import RewardResult, Segment
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.types import Sample, UsageError


class EnvironmentReward(Reward):
    """The reward of `data.environment`: that of its outcome and of its turns together.

    The environment decides what is right; a tool, or a game, needs no other reward. What it gives for a turn is also a
    segment that ends with the turn, so `ProcessSupervision` credits each turn with what comes after it. The outcome
    belongs to the last turn.
    """

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Status `ok`; the sum of all that the environment gave."""
        result = RewardResult([], [], segments=[])
        assert result.segments is not None
        for sample in samples:
            talk = sample.conversation
            if talk is None:
                raise UsageError("EnvironmentReward: set data.environment, whose reward this is")
            last = [0.0] * (len(talk.rewards) - 1) + [talk.outcome or 0.0]
            values = [value + extra for value, extra in zip(talk.rewards, last, strict=True)]
            result.value.append(sum(values))
            result.status.append("ok")
            result.segments.append([Segment(end, value) for end, value in zip(talk.ends, values, strict=True)])
        return result
