"""Rewards for the length of a completion."""

import math
from collections.abc import Sequence

from grpo_lightning.rewards.base import OK, Reward, RewardResult, Run
from grpo_lightning.rewards.gate import part_of
from grpo_lightning.types import Sample, UsageError


class LengthReward(Reward):
    """How near the length is to a target: 0 at `target` tokens, falling evenly to -1 at none and at twice the target.

    -min(1, ||o_i| - target| / target). With weight α * target this is the term -α ||o_i| - target| of LCPO-Exact
    (arXiv 2503.04697, Eq. 1), which is not clamped. For an upper limit alone see `OverlongPenalty`.

    Args:
        target: Tokens wanted, with the stop token.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.
    """

    def __init__(self, target: int, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if target < 1:
            raise UsageError(f"target={target} of LengthReward: give 1 token or more")
        self.target = target

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """A number from -1 to 0 a sample; it never fails."""
        away = [abs(len(sample.token_ids) - self.target) / self.target for sample in samples]
        return RewardResult([-min(1.0, share) for share in away], [OK] * len(samples))


class CosineLength(Reward):
    """Right answers are worth more the shorter they are, wrong ones less: the cosine reward of arXiv 2502.03373.

    long + (short - long) (1 + cos(π min(|o_i| / max_length, 1))) / 2, with the pair of values of right or of wrong
    answers (its Eq. of CosFn). A truncated completion is worth `truncated`, right or not, where that is given.

    The paper's values are 2 and 1 for right answers, -10 and 0 for wrong ones, -10 for truncated ones. The defaults are
    tamer: wrong answers are all worth 0, because a wrong answer that pays for being long teaches long wrong answers.

    Args:
        verifier: The reward that decides what is right: above 0.5. It replaces that reward in the list.
        max_length: Tokens from which `long` holds; None is the run's `sampling.max_new_tokens`.
        right_short: Value of a right answer without length.
        right_long: Value of a right answer of `max_length`.
        wrong_short: Value of a wrong answer without length.
        wrong_long: Value of a wrong answer of `max_length`.
        truncated: Value of a completion that was cut off; None treats it as any other.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.

    Raises:
        UsageError: `max_length` is below 1, or `verifier` has a weight other than 1 or learns.
    """

    def __init__(
        self,
        verifier: Reward,
        max_length: int | None = None,
        right_short: float = 1.0,
        right_long: float = 0.5,
        wrong_short: float = 0.0,
        wrong_long: float = 0.0,
        truncated: float | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        if max_length is not None and max_length < 1:
            raise UsageError(f"max_length={max_length} of CosineLength: give 1 token or more")
        self.verifier = part_of(self, "verifier", verifier)
        self.parts = (self.verifier,)
        self.max_length = max_length
        self._longest = max_length
        self.right = right_short, right_long
        self.wrong = wrong_short, wrong_long
        self.truncated = truncated

    def setup(self, run: Run) -> None:
        """Takes the run's limit where `max_length` is None."""
        super().setup(run)
        self._longest = self.max_length or run.max_new_tokens

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """The verifier's statuses and answers; NaN where it failed."""
        result = self.verifier(samples)
        values = [self._value(sample, value) for sample, value in zip(samples, result.value, strict=True)]
        return RewardResult(values, result.status, result.answer)

    def _value(self, sample: Sample, verdict: float) -> float:
        if math.isnan(verdict):
            return math.nan
        if sample.truncated and self.truncated is not None:
            return self.truncated
        short, long = self.right if verdict > 0.5 else self.wrong
        assert self._longest is not None, "give max_length, or call setup(run)"
        progress = min(len(sample.token_ids) / self._longest, 1.0)
        return long + (short - long) * (1 + math.cos(math.pi * progress)) / 2
