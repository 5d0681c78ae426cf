"""A reward for the length of a completion."""

from collections.abc import Sequence

from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward, Run
from grpo_lightning.types import Sample, at_least


class OverlongPenalty(Reward):
    """Soft overlong punishment: 0 up to max_length - cache tokens, then falling to -1 at max_length and beyond.

    In between it is -(|o_i| - (max_length - cache)) / cache (DAPO, arXiv 2503.14476, Eq. 13). It teaches the policy to
    finish within the limit, without a sudden loss at the limit itself.

    Args:
        max_length: L_max in tokens; None is the run's `sampling.max_new_tokens`.
        cache: L_cache, the number of tokens before `max_length` over which the penalty grows. None is a fifth of
            `max_length`, as in the paper (4,096 of 20,480).
    """

    def __init__(
        self, max_length: int | None = None, cache: int | None = None, weight: float = 1.0, name: str | None = None
    ) -> None:
        super().__init__(weight, name)
        at_least("cache", cache, 1, "OverlongPenalty")
        at_least(f"cache={cache}, max_length", max_length, cache or 1, "OverlongPenalty")
        self.max_length = max_length
        self.cache = cache
        self._longest = max_length
        """L_max in tokens; None until `setup` where no `max_length` was set."""

    def setup(self, run: Run) -> None:
        super().setup(run)
        self._longest = self.max_length or run.max_new_tokens
        at_least(f"cache={self.cache}, max_length", self._longest, self.cache or 1, "OverlongPenalty")

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Gives a number from -1 to 0 to each sample; it never fails."""
        assert self._longest is not None, "give max_length, or call setup(run)"
        cache = self.cache or max(1, self._longest // 5)
        excess = [len(sample.token_ids) - (self._longest - cache) for sample in samples]
        return RewardResult([-min(max(num_tokens / cache, 0.0), 1.0) for num_tokens in excess])
