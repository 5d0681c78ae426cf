"""Advantages: how much better a completion is than its group. Rewards [B] in, Â [B] out, the same for every token."""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.ragged import segment_sum
from grpo_lightning.types import UsageError


class AdvantageEstimator(ABC):
    """Â from rewards. A NaN reward (a failed sample) takes no part in its group's statistics and gets advantage 0."""

    @abstractmethod
    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """[B] float64 rewards without NaN, [B] int64 group of each -> [B] float64. Groups may be empty."""

    def __call__(self, reward: Tensor, group: Tensor) -> Tensor:
        """[B] rewards, [B] int64 group of each -> [B] float32."""
        assert reward.ndim == 1 and reward.shape == group.shape
        advantage = torch.zeros(len(reward), dtype=torch.float64, device=reward.device)
        valid = ~reward.isnan()
        if valid.any():
            num_groups = int(group.max()) + 1
            advantage[valid] = self.estimate(reward[valid].double(), group[valid], num_groups)
        return advantage.float()


class GroupStd(AdvantageEstimator):
    """GRPO: Â_i = (r_i - mean(r)) / (std(r) + advantage_eps) over the group (DeepSeekMath 4.1.2; CS336 Eq. 28).

    A group whose rewards are all equal, a group of one among them, gets exactly 0.

    Args:
        advantage_eps: Added to the standard deviation.
        std: `sample` divides the squared deviations by G - 1, `population` by G. The paper does not say; TRL uses
            `sample`.
    """

    def __init__(self, advantage_eps: float = 1e-6, std: Literal["population", "sample"] = "sample") -> None:
        if advantage_eps < 0:
            raise UsageError(f"advantage_eps={advantage_eps}: give 0 or a small positive number such as 1e-6")
        self.advantage_eps = advantage_eps
        self.std = std

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        count = segment_sum(torch.ones_like(reward), group, num_groups).clamp(min=1)
        deviation = reward - (segment_sum(reward, group, num_groups) / count)[group]
        divisor = count if self.std == "population" else (count - 1).clamp(min=1)
        std = (segment_sum(deviation.square(), group, num_groups) / divisor).sqrt()
        advantage = deviation / (std + self.advantage_eps)[group]
        return torch.where(has_spread(reward, group, num_groups)[group], advantage, 0.0)


def has_spread(reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """[num_groups] bool: whether the group's rewards differ at all; NaN rewards do not count."""
    valid = ~reward.isnan()
    bounds = [
        torch.full((num_groups,), sign * torch.inf, dtype=reward.dtype, device=reward.device).scatter_reduce(
            0, group[valid], reward[valid], reduce
        )
        for sign, reduce in ((1, "amin"), (-1, "amax"))
    ]
    return bounds[1] > bounds[0]
