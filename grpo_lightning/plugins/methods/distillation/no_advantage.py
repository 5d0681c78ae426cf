"""The advantage of a run that learns from its KL term alone."""

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import AdvantageEstimator


class NoAdvantage(AdvantageEstimator):
    """Â = 0 for every token: rewards only watch, and the KL term alone teaches, as in on-policy distillation."""

    compares_group = False

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return torch.zeros_like(reward)
