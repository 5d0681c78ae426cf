"""A penalty for repeated text."""

from collections.abc import Sequence

from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.types import Sample, Status, at_least


class RepetitionPenalty(Reward):
    """Minus the fraction of n-grams that occurred earlier in the completion: 0 without repetition, at worst near -1.

    distinct / all - 1 over the n-grams of its tokens (the repetition penalty of arXiv 2502.03373, summed over a
    completion as in open-r1). A completion too short for an n-gram gets 0. The stop token counts as a token. It keeps
    a policy that is paid for length from repeating itself.

    Args:
        ngram: n, in tokens. Short n-grams repeat in any text; 20 tokens are one or two sentences.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics.
    """

    def __init__(self, ngram: int = 20, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        at_least("ngram", ngram, 1, "RepetitionPenalty")
        self.ngram = ngram

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """A number above -1 and at most 0 per sample; it never fails."""
        return RewardResult([-repeated_fraction(s.token_ids, self.ngram) for s in samples], [Status.OK] * len(samples))


def repeated_fraction(token_ids: Sequence[int], ngram: int) -> float:
    """The fraction of n-grams that occurred before, from 0 to below 1."""
    count = len(token_ids) - ngram + 1
    if count < 1:
        return 0.0
    distinct = len({tuple(token_ids[start : start + ngram]) for start in range(count)})
    return 1 - distinct / count
