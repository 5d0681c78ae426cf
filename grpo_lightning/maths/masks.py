"""Masks: tokens to leave out of the objective. A mask sets their weight to 0; other weights stay."""

from abc import ABC, abstractmethod

from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import UsageError

ENTROPY_RANK = "entropy_rank"
"""Column: the fraction of the step's tokens, over all ranks, at which π_old has less entropy."""


class TokenMask(ABC):
    """Which tokens are learned from, decided once per step, before the passes.

    It sees tokens, lengths, `truncated` and, on demand, the column `entropy_rank`. Log-probs are not known yet.
    """

    reads_entropy: bool = False
    """Whether it needs the column `entropy_rank`, which costs a pass over the rollouts."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[N] bool, True for tokens that stay."""


class Truncated(TokenMask):
    """Leaves out completions cut off at `max_new_tokens`: DAPO's overlong filtering (arXiv 2503.14476, Sec. 3.4).

    A sound solution that only ran out of room is then not punished. Its reward still counts in the group's baseline.
    """

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[N] bool: tokens of completions that ended by themselves."""
        return rollouts.spread(~rollouts.truncated)


class TopEntropy(TokenMask):
    """Keeps the tokens at which π_old has most entropy, of all tokens of the step (arXiv 2506.01939).

    Those are the forks of a solution; by the paper, learning from them alone is as good or better.

    Args:
        fraction: ρ, the fraction of tokens that stay; 0.2 in the paper.
    """

    reads_entropy = True

    def __init__(self, fraction: float = 0.2) -> None:
        if not 0 < fraction <= 1:
            raise UsageError(f"fraction={fraction} of TopEntropy: give more than 0 and at most 1; the paper takes 0.2")
        self.fraction = fraction

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[N] bool: tokens of the highest entropy."""
        return rollouts.columns[ENTROPY_RANK] >= 1 - self.fraction
