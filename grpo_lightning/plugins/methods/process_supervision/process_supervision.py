"""Process supervision: advantages per token from rewards of the segments inside completions."""

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import GroupStd
from grpo_lightning.maths.ragged import pad, positions, segments, starts
from grpo_lightning.maths.reward_batch import RewardBatch, SegmentRewards
from grpo_lightning.types import UsageError


class ProcessSupervision(GroupStd):
    """GRPO with process supervision: Â_it = sum of the normalised rewards of the segments that end at t or later.

    The policy learns where a long solution goes wrong, not only that it does. The rewards r of all segments of a group
    are normalised together, r~ = (r - mean(r)) / (std(r) + eps) (DeepSeekMath 4.1.3). A reward of whole completions
    counts as one segment that ends at the last token. Each reward of the list is normalised by itself, and the
    advantages of all rewards are summed by weight.

    Args:
        advantage_eps: Added to the standard deviation.
        std: Standard deviation over the segments of a group, as in `GroupStd`.
    """

    def per_token(self, rewards: RewardBatch) -> Tensor:
        if rewards.total.isnan().all():
            # Every environment or reward has failed, so there are no segments either.
            return torch.zeros(int(rewards.lengths.sum()), dtype=torch.float32, device=rewards.lengths.device)
        if not any(rewards.segments):
            raise UsageError(
                "ProcessSupervision: no reward scores segments; add one whose RewardResult has `segments`, or use"
                " GroupStd"
            )
        lengths = rewards.lengths

        # A completion that any reward or segment failed on counts in no group.
        is_valid = ~rewards.total.isnan()
        for scored in rewards.segments:
            if scored is not None:
                is_valid[scored.row[scored.value.isnan()]] = False

        # The normalised rewards at the last token of each segment, summed over rewards.
        reward_at_end = torch.zeros(int(lengths.sum()), dtype=torch.float64, device=lengths.device)
        whole_rows = torch.arange(len(lengths), device=lengths.device)
        for value, weight, scored in zip(rewards.value, rewards.weight, rewards.segments, strict=True):
            scored = scored or SegmentRewards(whole_rows, lengths - 1, value)
            is_counted = is_valid[scored.row]
            row = scored.row[is_counted]
            if len(row):
                normalised = self.estimate(scored.value[is_counted], rewards.group[row], int(rewards.group.max()) + 1)
                reward_at_end.index_add_(0, starts(lengths)[row] + scored.end[is_counted], weight * normalised)

        # Cumulative from the last token to the first: the advantage of a token sums rewards that end there or later.
        advantage = pad(reward_at_end, lengths).flip(1).cumsum(1).flip(1)
        return advantage[segments(lengths), positions(lengths)].float()
