"""DAPO's penalty for completions that come near the length limit."""

from collections.abc import Sequence

from grpo_lightning.rewards.base import OK, Reward, RewardResult
from grpo_lightning.types import Sample, UsageError


class OverlongPenalty(Reward):
    """Soft overlong punishment: 0 up to max_length - cache tokens, from there falling to -1 at max_length and beyond.

    -(|o_i| - (max_length - cache)) / cache in between (DAPO, arXiv 2503.14476, Eq. 13).

    Args:
        max_length: L_max in tokens, by convention `sampling.max_new_tokens`.
        cache: L_cache, the tokens before it over which the penalty grows.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.
    """

    def __init__(self, max_length: int, cache: int, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if not 0 < cache <= max_length:
            raise UsageError(f"cache={cache} of OverlongPenalty: give 1 to max_length={max_length} tokens")
        self.max_length = max_length
        self.cache = cache

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """A number from -1 to 0 a sample; it never fails."""
        over = [len(sample.token_ids) - (self.max_length - self.cache) for sample in samples]
        return RewardResult([-min(max(tokens / self.cache, 0.0), 1.0) for tokens in over], [OK] * len(samples))
