"""GDPO: each reward is normalised by itself."""

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import GroupStd
from grpo_lightning.maths.ragged import per_element
from grpo_lightning.maths.reward_batch import RewardBatch, weighted_sum
from grpo_lightning.plugins.methods.advantages.batch_std import over_batch


class PerRewardStd(GroupStd):
    """GDPO: normalises each reward over the group by itself, then their weighted sum over the batch.

    For several rewards: a reward of large spread does not hide a reward of small spread (arXiv 2601.05242, Sec. 3).
    A_i = sum_k weight_k (r_ik - mean(r_k)) / (std(r_k) + eps) and Â_i = A_i / (std of A over the batch + eps).
    The mean of A over the batch, which the paper subtracts, is 0 already.

    Args:
        advantage_eps: Added to the standard deviations.
        std: Standard deviation over the group, as in `GroupStd`. Over the batch it is always `population`.
    """

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return over_batch(super().estimate(reward, group, num_groups), self.advantage_eps)

    def per_token(self, rewards: RewardBatch) -> Tensor:
        advantage = torch.zeros_like(rewards.total)
        valid = ~rewards.total.isnan()
        group = rewards.group[valid]
        if valid.any():
            estimate = super().estimate
            num_groups = int(group.max()) + 1
            # A reward is normalised over the completions that it applies to, and adds nothing to the others.
            normalised = torch.zeros_like(rewards.value[:, valid])
            for row, value in enumerate(rewards.value[:, valid]):
                applies = ~value.isnan()
                normalised[row, applies] = estimate(value[applies], group[applies], num_groups)
            advantage[valid] = over_batch(weighted_sum(rewards.weight, normalised), self.advantage_eps)
        return per_element(advantage.float(), rewards.lengths)
