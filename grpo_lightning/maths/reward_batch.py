"""The rewards of one exploration step as tensors: what advantages are computed from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class SegmentRewards:
    """Rewards of S segments inside completions, ragged: a completion may have any number of them."""

    row: Tensor
    """[S] int64, the completion the segment belongs to."""
    end: Tensor
    """[S] int64, place of the segment's last token in its completion, from 0."""
    value: Tensor
    """[S] float64."""


@dataclass(slots=True)
class RewardBatch:
    """K rewards of B completions. Every group is whole."""

    value: Tensor
    """[K, B] float64, without their weights; NaN where a reward failed."""
    weight: Tensor
    """[K] float64, the factor of each reward in the total."""
    group: Tensor
    """[B] int64, the prompt that each completion answers."""
    lengths: Tensor
    """[B] int64, |o_i|."""
    segments: list[SegmentRewards | None]
    """K: the segments of each reward; None for one that scores completions as a whole."""

    @property
    def total(self) -> Tensor:
        """[B] float64: R(q, o_i), the weighted sum; NaN where a reward failed."""
        return (self.weight[:, None] * self.value).sum(0)

    def plus(self, value: Tensor, weight: float) -> "RewardBatch":
        """One reward more: [B] values and its weight."""
        return RewardBatch(
            value=torch.cat([self.value, value[None].to(self.value)]),
            weight=torch.cat([self.weight, self.weight.new_tensor([weight])]),
            group=self.group,
            lengths=self.lengths,
            segments=[*self.segments, None],
        )

    @classmethod
    def concat(cls, batches: Sequence["RewardBatch"]) -> "RewardBatch":
        """The same rewards of several batches, whose groups are all different ones."""
        rows = [0, *torch.tensor([len(b.group) for b in batches]).cumsum(0).tolist()]
        groups = [0, *torch.tensor([int(b.group.max()) + 1 if len(b.group) else 0 for b in batches]).cumsum(0).tolist()]
        segments: list[SegmentRewards | None] = []
        for number in range(len(batches[0].segments)):
            own = [(batch.segments[number], offset) for batch, offset in zip(batches, rows, strict=False)]
            parts = [(part, offset) for part, offset in own if part is not None]
            joined = (
                SegmentRewards(
                    row=torch.cat([part.row + offset for part, offset in parts]),
                    end=torch.cat([part.end for part, _ in parts]),
                    value=torch.cat([part.value for part, _ in parts]),
                )
                if parts
                else None
            )
            segments.append(joined)
        return cls(
            value=torch.cat([batch.value for batch in batches], dim=1),
            weight=batches[0].weight,
            group=torch.cat([batch.group + offset for batch, offset in zip(batches, groups, strict=False)]),
            lengths=torch.cat([batch.lengths for batch in batches]),
            segments=segments,
        )
