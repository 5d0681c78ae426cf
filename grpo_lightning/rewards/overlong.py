"""DAPO's penalty for completions that come near the length limit."""

from collections.abc import Sequence

from grpo_lightning.rewards.base import OK, Reward, RewardResult, Run
from grpo_lightning.types import Sample, UsageError


class OverlongPenalty(Reward):
    """Soft overlong punishment: 0 up to max_length - cache tokens, from there falling to -1 at max_length and beyond.

    -(|o_i| - (max_length - cache)) / cache in between (DAPO, arXiv 2503.14476, Eq. 13).

    Args:
        max_length: L_max in tokens; None is the run's `sampling.max_new_tokens`.
        cache: L_cache, the tokens before it over which the penalty grows; None is a fifth of `max_length`, as in the
            paper (4,096 of 20,480).
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.
    """

    def __init__(
        self,
        max_length: int | None = None,
        cache: int | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        if max_length is not None and max_length < 1:
            raise UsageError(f"max_length={max_length} of OverlongPenalty: give 1 token or more")
        if cache is not None and cache < 1:
            raise UsageError(f"cache={cache} of OverlongPenalty: give 1 token or more")
        self.max_length = max_length
        self.cache = cache
        self._sizes = None if max_length is None else self._sizes_of(max_length)

    def setup(self, run: Run) -> None:
        """Takes the run's limit where `max_length` is None."""
        super().setup(run)
        self._sizes = self._sizes_of(self.max_length or run.max_new_tokens)

    def _sizes_of(self, max_length: int) -> tuple[int, int]:
        """Tokens that are free of a penalty, and tokens over which it grows."""
        cache = self.cache or max(1, max_length // 5)
        if cache > max_length:
            raise UsageError(f"cache={cache} of OverlongPenalty: give 1 to max_length={max_length} tokens")
        return max_length - cache, cache

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """A number from -1 to 0 a sample; it never fails."""
        assert self._sizes is not None, "give max_length, or call setup(run)"
        free, cache = self._sizes
        over = [len(sample.token_ids) - free for sample in samples]
        return RewardResult([-min(max(tokens / cache, 0.0), 1.0) for tokens in over], [OK] * len(samples))
