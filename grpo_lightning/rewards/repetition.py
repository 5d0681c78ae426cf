"""The penalty for saying the same again."""

from collections.abc import Sequence

from grpo_lightning.rewards.base import OK, Reward, RewardResult
from grpo_lightning.types import Sample, UsageError


class RepetitionPenalty(Reward):
    """Minus the share of n-grams that stood in the completion before: 0 without repetition, near -1 with nothing else.

    distinct / all - 1 over the n-grams of its tokens (the repetition penalty of arXiv 2502.03373, as open-r1 sums it up
    for a completion); 0 for one that is too short to have an n-gram. The stop token counts as a token.

    Args:
        ngram: n, in tokens. Small ones repeat in any text: 20 tokens are one or two sentences.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.
    """

    def __init__(self, ngram: int = 20, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if ngram < 1:
            raise UsageError(f"ngram={ngram} of RepetitionPenalty: give 1 token or more")
        self.ngram = ngram

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """A number above -1, at most 0, a sample; it never fails."""
        return RewardResult([-repeated_fraction(s.token_ids, self.ngram) for s in samples], [OK] * len(samples))


def repeated_fraction(token_ids: Sequence[int], ngram: int) -> float:
    """Share of the n-grams that occurred before, from 0 to below 1."""
    count = len(token_ids) - ngram + 1
    if count < 1:
        return 0.0
    distinct = len({tuple(token_ids[start : start + ngram]) for start in range(count)})
    return 1 - distinct / count
