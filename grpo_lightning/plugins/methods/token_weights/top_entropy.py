"""A mask that keeps the tokens with the highest entropy."""

from torch import Tensor

from grpo_lightning.maths.filters import ENTROPY_RANK, TokenMask
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import require


class TopEntropy(TokenMask):
    """Keeps the tokens of the step at which π_old has the highest entropy (arXiv 2506.01939).

    They are the forks of a solution. In the paper, learning from these tokens alone is as good or better.

    Args:
        fraction: ρ, the fraction of tokens that stay; 0.2 in the paper.
    """

    reads_entropy = True

    def __init__(self, fraction: float = 0.2) -> None:
        require(0 < fraction <= 1, f"fraction={fraction} of TopEntropy: give more than 0 and at most 1, e.g. 0.2")
        self.fraction = fraction

    def __call__(self, rollouts: Rollouts) -> Tensor:
        return rollouts.columns[ENTROPY_RANK] >= 1 - self.fraction
