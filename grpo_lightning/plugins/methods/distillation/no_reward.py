"""The reward of a run that has none."""

from collections.abc import Sequence

from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.types import Sample


class NoReward(Reward):
    """0 for every completion: for questions that nothing can score, where a teacher alone teaches.

    The judge of the task, or `model.validation.grader`, still says in validation what is right.
    """

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([0.0] * len(samples))
