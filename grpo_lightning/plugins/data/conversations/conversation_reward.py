"""The reward that the environment of a conversation gives."""

from collections.abc import Sequence

from grpo_lightning.rewards.results import RewardResult, Segment
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.types import Sample, UsageError


class EnvironmentReward(Reward):
    """The reward of `data.environment`: the sum of the rewards of all turns and of the outcome.

    The environment decides what is right; a tool, or a game, needs no other reward. The reward of a turn is also a
    segment that ends with the turn, so `ProcessSupervision` credits each turn with the rewards after it. The outcome
    belongs to the last turn.
    """

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Returns the sum of the environment's rewards, with status `ok`."""
        result = RewardResult([], [], segments=[])
        assert result.segments is not None
        for sample in samples:
            conversation = sample.conversation
            if conversation is None:
                raise UsageError("EnvironmentReward: set data.environment, whose reward this is")
            outcomes = [0.0] * (len(conversation.rewards) - 1) + [conversation.outcome or 0.0]
            values = [reward + outcome for reward, outcome in zip(conversation.rewards, outcomes, strict=True)]
            result.value.append(sum(values))
            result.status.append("ok")
            result.segments.append([Segment(end, value) for end, value in zip(conversation.ends, values, strict=True)])
        return result
