"""A reward that counts only where another one is earned."""

import math
from collections.abc import Sequence

from grpo_lightning.rewards.base import OK, Reward, RewardResult, Segment
from grpo_lightning.types import Sample, UsageError

CLOSED = "closed"


def part_of(whole: Reward, key: str, part: Reward) -> Reward:
    """`part`, if it can be the argument `key` of `whole`.

    Raises:
        UsageError: It has a weight, which nobody would look at, or it learns, which it could not here.
    """
    if part.weight != 1:
        raise UsageError(f"{key}.weight={part.weight} of {whole.name}: leave it at 1; `weight` of {whole.name} counts")
    if type(part).learn is not Reward.learn:
        raise UsageError(f"{key}={type(part).__name__} of {whole.name}: a reward that learns stands in the list itself")
    return part


class Gated(Reward):
    """The value of one reward where another one, the gate, is above a threshold, and 0 elsewhere.

    `Gated(reward=FormatReward, gate=MathVerifier)` lets correctness gate format: form earns nothing without content.

    Args:
        reward: What counts where the gate is open.
        gate: What decides. A completion on which it fails has failed here too.
        threshold: The gate is open above it.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.

    Raises:
        UsageError: `reward` or `gate` has a weight other than 1, or learns.
    """

    def __init__(
        self, reward: Reward, gate: Reward, threshold: float = 0.5, weight: float = 1.0, name: str | None = None
    ) -> None:
        super().__init__(weight, name)
        self.reward = part_of(self, "reward", reward)
        self.gate = part_of(self, "gate", gate)
        self.threshold = threshold
        self.parts = self.gate, self.reward

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """What the two say, the gate first: `no_answer-no_match`. `ok` is left out of it; two of them are `ok` where
        the gate is open and `closed` where it is not. The answers are the gate's."""
        gates, inner = self.gate(samples), self.reward(samples)
        result = RewardResult([], [], gates.answer, None if inner.segments is None else [])
        for row, gate in enumerate(gates.value):
            is_open = gate > self.threshold
            result.value.append(math.nan if math.isnan(gate) else inner.value[row] if is_open else 0.0)
            said = [status for status in (gates.status[row], inner.status[row]) if status != OK]
            result.status.append("-".join(said) or (OK if is_open else CLOSED))
            if result.segments is not None:
                assert inner.segments is not None
                segments = inner.segments[row]
                result.segments.append(segments if is_open else [Segment(segment.end, 0.0) for segment in segments])
        return result
