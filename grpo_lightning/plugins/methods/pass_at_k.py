"""The advantage for the best of k answers."""

from math import comb

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import AdvantageEstimator, centred, quotient
from grpo_lightning.types import at_least


class PassAtK(AdvantageEstimator):
    """Pass@k training: the credit of a completion in sets of k, not alone (arXiv 2508.10751, analytical derivation).

    A set of k completions is worth its largest reward. Â_i = (mean of the sets that hold i - mean of all sets) / (std
    of all sets + eps), over all sets of the group. Once one answer is right, other right ones add nothing: it pays for
    what the group lacks, where GRPO makes the likely answer surer.

    Args:
        k: Completions in a set, less than G: in a smaller group all but one. `k: 1` is `GroupStd` of the population.
        advantage_eps: Added to the standard deviation.
    """

    def __init__(self, k: int = 4, advantage_eps: float = 1e-6) -> None:
        at_least("k", k, 1, "PassAtK")
        at_least("advantage_eps", advantage_eps, 0, "PassAtK")
        self.k, self.advantage_eps = k, advantage_eps

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        deviation, _ = centred(reward, group, num_groups)
        advantage = torch.zeros_like(reward)
        for index in group.unique().tolist():
            rows = (group == index).nonzero().squeeze(1)
            order = rows[deviation[rows].argsort(stable=True)]
            advantage[order] = self.of_group(deviation[order])
        return advantage

    def of_group(self, value: Tensor) -> Tensor:
        """[n] advantages from [n] rewards in ascending order."""
        n = len(value)
        if n == 1 or not value.any():
            return torch.zeros_like(value)
        k = min(self.k, n - 1)
        # The sets whose largest is j; those of them that hold i, below j or equal to it.
        largest = value.new_tensor([comb(j, k - 1) / comb(n, k) for j in range(n)])
        own = value.new_tensor([comb(i, k - 1) / comb(n - 1, k - 1) for i in range(n)])
        above = value.new_tensor([comb(j - 1, k - 2) / comb(n - 1, k - 1) if j and k > 1 else 0.0 for j in range(n)])
        higher = (above * value).flip(0).cumsum(0).flip(0) - above * value
        mean = (largest * value).sum()
        std = (largest * (value - mean).square()).sum().sqrt()
        return quotient(own * value + higher - mean, std + self.advantage_eps)
