"""The advantage whose gradient approaches the gradient of maximum likelihood."""

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import AdvantageEstimator, centred
from grpo_lightning.maths.ragged import segment_sum


class MaxRL(AdvantageEstimator):
    """MaxRL: Â_i = (r_i - mean(r)) / mean(r) over the group; 0 where the mean is not above 0 (arXiv 2602.02710).

    A prompt solved with probability p weighs 1/p: as the group grows, the gradient becomes the gradient of log p, which
    is maximum likelihood; with `GroupMean` it is the gradient of p. Rarely solved prompts count more. For rewards of 0
    and 1: with negative rewards a mean near 0 says nothing.
    """

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        deviation, count = centred(reward, group, num_groups)
        mean = (segment_sum(reward, group, num_groups) / count.clamp(min=1))[group]
        return torch.where((mean > 0) & (deviation != 0), deviation / mean, 0.0)
