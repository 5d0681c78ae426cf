"""An advantage that keeps only the sign."""

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import ROUNDING, AdvantageEstimator, centred
from grpo_lightning.types import at_least


class Sign(AdvantageEstimator):
    """Keeps only the sign of Â: +1 above the group's mean, -1 below it, 0 close to it.

    For rewards whose order can be trusted but whose size cannot.

    Args:
        dead_zone: Largest distance from the mean that counts as close, in units of reward.
    """

    def __init__(self, dead_zone: float = 0.0) -> None:
        at_least("dead_zone", dead_zone, 0, "Sign")
        self.dead_zone = dead_zone

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        deviation = centred(reward, group, num_groups)[0]
        size = deviation.abs()
        largest = size.new_zeros(num_groups).scatter_reduce(0, group, size, "amax")
        return torch.where(size > self.dead_zone + ROUNDING * largest[group], deviation.sign(), 0.0)
