"""The reward of a run in which only a teacher teaches."""

from collections.abc import Sequence

from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.types import Sample


class NoReward(Reward):
    """Gives 0 to every completion, for questions that nothing can score: only a teacher teaches.

    In validation the grader of the task, or `model.validation.grader`, still decides what is right.
    """

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([0.0] * len(samples))
