"""The advantage of a run that learns only from its KL term."""

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import AdvantageEstimator


class NoAdvantage(AdvantageEstimator):
    """Sets Â = 0 for every token, as in on-policy distillation: only the KL term teaches, and rewards are metrics."""

    compares_group = False

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return torch.zeros_like(reward)
