"""Masks: tokens that are not learned from. A mask makes a token's weight 0 and leaves the weights of the others."""

from abc import ABC, abstractmethod

from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import UsageError


class TokenMask(ABC):
    """Which tokens are learned from, decided once per step, before the passes.

    It sees tokens, lengths, `truncated` and, if it asks for it, `entropy_rank`; log-probs are not known yet.
    """

    reads_entropy: bool = False
    """Whether it needs `entropy_rank`, which costs a pass over the rollouts."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[N] bool: the tokens that stay."""


class Truncated(TokenMask):
    """Leaves out completions cut off at `max_new_tokens`: DAPO's overlong filtering (arXiv 2503.14476, Sec. 3.4).

    Their rewards still count in the baseline of their group.
    """

    def __call__(self, rollouts: Rollouts) -> Tensor:
        return rollouts.spread(~rollouts.truncated)


class TopEntropy(TokenMask):
    """Keeps the tokens at which π_old was least sure, by entropy among all of the step's tokens (arXiv 2506.01939).

    Args:
        share: ρ, of the tokens that stay; 0.2 in the paper.
    """

    reads_entropy = True

    def __init__(self, share: float = 0.2) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"share={share} of TopEntropy: give more than 0 and at most 1; the paper takes 0.2")
        self.share = share

    def __call__(self, rollouts: Rollouts) -> Tensor:
        assert rollouts.entropy_rank is not None
        return rollouts.entropy_rank >= 1 - self.share
