"""A weighting that counts every prompt the same."""

from torch import Tensor

from grpo_lightning.maths.ragged import segment_sum
from grpo_lightning.maths.weightings import BatchSize, TokenWeighting


class GroupTokenMean(TokenWeighting):
    """Weighs a token 1 / (groups * tokens of the group): the mean over groups of the mean over a group's tokens.

    Every prompt counts the same, however long its completions are. In a group every token counts the same.
    """

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        tokens = segment_sum(lengths, group, int(group.max()) + 1 if len(group) else 0)[group]
        return 1.0 / (batch.num_groups * tokens.clamp(min=1).float())
