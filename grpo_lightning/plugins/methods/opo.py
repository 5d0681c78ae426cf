"""The baseline weighted by length."""

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import AdvantageEstimator, centred
from grpo_lightning.maths.ragged import segment_sum, spread
from grpo_lightning.maths.reward_batch import RewardBatch


class OPO(AdvantageEstimator):
    """OPO: Â_i = r_i - sum_j |o_j| r_j / sum_j |o_j| over the group (arXiv 2505.23585).

    The baseline of least variance where a completion's gradient is as large as its length, as it is with `TokenMean`
    and `Unweighted`. For strictly on-policy steps, without a KL term.
    """

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """Of completions of one length, whose baseline is the mean."""
        return centred(reward, group, num_groups)[0]

    def per_token(self, rewards: RewardBatch) -> Tensor:
        valid, advantage = ~rewards.total.isnan(), torch.zeros_like(rewards.total)
        group, length = rewards.group[valid], rewards.lengths[valid].double()
        if valid.any():
            # From deviations, so that a group without spread has exactly 0.
            count = int(group.max()) + 1
            deviation, _ = centred(rewards.total[valid], group, count)
            baseline = segment_sum(length * deviation, group, count) / segment_sum(length, group, count).clamp(min=1)
            advantage[valid] = deviation - baseline[group]
        return spread(advantage.float(), rewards.lengths)
