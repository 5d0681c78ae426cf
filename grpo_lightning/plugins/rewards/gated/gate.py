"""A reward that counts only where another reward is high enough."""

import math
from collections.abc import Sequence

from grpo_lightning.rewards.function import as_reward
from grpo_lightning.rewards.results import RewardResult, Segment
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.types import Sample, Status, UsageError


def nested(owner: Reward, key: str, reward: Reward) -> Reward:
    """Returns the reward that `owner` has as its argument `key`. Raises UsageError if it has a weight or learns."""
    reward = as_reward(reward)
    if reward.weight != 1:
        raise UsageError(
            f"{key}.weight={reward.weight} of {owner.name}: leave it at 1; `weight` of {owner.name} counts"
        )
    if type(reward).learn is not Reward.learn:
        raise UsageError(
            f"{key}={type(reward).__name__} of {owner.name}: put a reward that learns into the list itself"
        )
    return reward


class Gated(Reward):
    """The value of one reward where a second reward, the gate, is above a threshold, and 0 elsewhere.

    `Gated(reward=FormatReward, gate=MathVerifier)` rewards the format of right answers, and gives 0 to wrong answers.

    Args:
        reward: The reward that counts where the gate is open.
        gate: The reward that decides. Completions that it fails to score get NaN.
        threshold: The gate is open where the value of `gate` is above this number.
    """

    def __init__(
        self, reward: Reward, gate: Reward, threshold: float = 0.5, weight: float = 1.0, name: str | None = None
    ) -> None:
        super().__init__(weight, name)
        self.reward = nested(self, "reward", reward)
        self.gate = nested(self, "gate", gate)
        self.threshold = threshold
        self.parts = self.gate, self.reward
        self.scores_early = all(reward.scores_early for reward in self.parts)
        self.grades_cheaply = all(reward.grades_cheaply for reward in self.parts)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Scores the completions by both rewards.

        A sample's status joins the statuses of gate and reward that are not `ok`: `no_answer-no_match`. If both are
        `ok`, it is `ok` where the gate is open, and else `closed`. The extracted answers come from the gate.
        """
        gates = self.gate(samples)
        inner = self.reward(samples)
        result = RewardResult([], [], gates.answer, None if inner.segments is None else [])
        for row, gate in enumerate(gates.value):
            is_open = gate > self.threshold
            result.value.append(math.nan if math.isnan(gate) else inner.value[row] if is_open else 0.0)
            statuses = [status for status in (gates.status[row], inner.status[row]) if status != Status.OK]
            result.status.append("-".join(statuses) or (Status.OK if is_open else Status.CLOSED))
            if result.segments is not None and inner.segments is not None:
                segments = inner.segments[row]
                result.segments.append(segments if is_open else [Segment(segment.end, 0.0) for segment in segments])
        return result
