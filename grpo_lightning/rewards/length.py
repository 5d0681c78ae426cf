"""Rewards for the length of a completion."""

import math
from collections.abc import Sequence

from grpo_lightning.rewards.base import Reward, Run
from grpo_lightning.rewards.gate import part_of
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.types import Sample, Status, at_least


class LengthReward(Reward):
    """The closeness of the length to a target: 0 at `target` tokens, falling linearly to -1 at 0 and at 2 target.

    -min(1, ||o_i| - target| / target). With weight α * target this is the term -α ||o_i| - target| of LCPO-Exact
    (arXiv 2503.04697, Eq. 1), which is not clamped. Use it for answers of one length; for an upper limit alone use
    `OverlongPenalty`.

    Args:
        target: The length wanted in tokens, the stop token included.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics.
    """

    def __init__(self, target: int, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        at_least("target", target, 1, "LengthReward")
        self.target = target

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """A number from -1 to 0 per sample; it never fails."""
        away = [abs(len(sample.token_ids) - self.target) / self.target for sample in samples]
        return RewardResult([-min(1.0, fraction) for fraction in away], [Status.OK] * len(samples))


class CosineLength(Reward):
    """The cosine reward of arXiv 2502.03373, by which short right answers are worth more than long ones.

    long + (short - long) (1 + cos(π min(|o_i| / max_length, 1))) / 2 (CosFn in the paper), with one pair of values for
    right answers and one for wrong answers. It keeps completions from growing, without a fixed limit.

    The paper's values are 2 and 1 for right answers, -10 and 0 for wrong ones, and -10 for truncated ones. By default
    all wrong answers are worth 0: paying long wrong answers more than short ones teaches long wrong answers.

    Args:
        verifier: The reward that decides what is right: above 0.5. It replaces that reward in the list.
        max_length: Length in tokens from which the `long` values hold; None is the run's `sampling.max_new_tokens`.
        right_short: Value of a right answer of length 0.
        right_long: Value of a right answer of `max_length`.
        wrong_short: Value of a wrong answer of length 0.
        wrong_long: Value of a wrong answer of `max_length`.
        truncated: Value of a truncated completion, right or wrong; None treats it like any other.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
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
        at_least("max_length", max_length, 1, "CosineLength")
        self.verifier = part_of(self, "verifier", verifier)
        self.parts = (self.verifier,)
        self.scores_early = self.verifier.scores_early
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
        """Statuses and answers are the verifier's; the value is NaN where it failed."""
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
