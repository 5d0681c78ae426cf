"""Process supervision: advantages per token from rewards of the segments inside completions."""

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import GroupStd
from grpo_lightning.maths.ragged import pad, positions, segments, starts
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.types import UsageError


class ProcessSupervision(GroupStd):
    """GRPO with process supervision: Â_it = sum of the normalised rewards of the segments that end at t or later.

    Tells the policy where a long solution goes wrong, not only that it does. The rewards r of all segments of a group
    are normalised together, r~ = (r - mean(r)) / (std(r) + eps) (DeepSeekMath 4.1.3). A reward of whole completions
    counts as one segment that ends at the last token. Each reward is normalised by itself. Their advantages are summed
    by weight.
    """

    def per_token(self, rewards: RewardBatch) -> Tensor:
        if rewards.total.isnan().all():
            # Nothing could be scored, so that there are no segments either: every environment or reward has failed.
            return torch.zeros(int(rewards.lengths.sum()), dtype=torch.float32, device=rewards.lengths.device)
        if not any(rewards.segments):
            raise UsageError(
                "ProcessSupervision: no reward scores segments; add one whose RewardResult has `segments`, or use"
                " GroupStd"
            )
        lengths, first = rewards.lengths, starts(rewards.lengths)
        every = torch.arange(len(lengths), device=lengths.device)
        valid = ~rewards.total.isnan()
        for scored in rewards.segments:
            if scored is not None:
                valid[scored.row[scored.value.isnan()]] = False
        ending = torch.zeros(int(lengths.sum()), dtype=torch.float64, device=lengths.device)
        for value, weight, scored in zip(rewards.value, rewards.weight, rewards.segments, strict=True):
            row, end, reward = (every, lengths - 1, value) if scored is None else (scored.row, scored.end, scored.value)
            row, end, reward = row[valid[row]], end[valid[row]], reward[valid[row]]
            if len(row):
                normalised = self.estimate(reward, rewards.group[row], int(rewards.group.max()) + 1)
                ending.index_add_(0, first[row] + end, weight * normalised)
        # Cumulative from the last token to the first: a token sums what ends at it or later.
        onward = pad(ending, lengths).flip(1).cumsum(1).flip(1)
        return onward[segments(lengths), positions(lengths)].float()
