"""The rewards of one exploration step as tensors, from which advantages are computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

EQUAL = 1e-9
"""Rewards that differ by at most this fraction of the larger one are equal. Sums of weights round: 0.1 + 0.2 > 0.3."""


@dataclass(slots=True)
class SegmentRewards:
    """Rewards of S segments inside completions, ragged: a completion may have any number of them."""

    row: Tensor
    """[S] int64, index of the completion that the segment belongs to."""
    end: Tensor
    """[S] int64, index of the segment's last token among the drawn tokens of its completion."""
    value: Tensor
    """[S] float64."""

    @classmethod
    def concat(cls, parts: Sequence[tuple["SegmentRewards", int]]) -> "SegmentRewards | None":
        """Several end to end, each with the number that is added to its rows; None if there are none."""
        if not parts:
            return None
        return cls(
            row=torch.cat([part.row + offset for part, offset in parts]),
            end=torch.cat([part.end for part, _ in parts]),
            value=torch.cat([part.value for part, _ in parts]),
        )


@dataclass(slots=True)
class RewardBatch:
    """K rewards of B completions. Every group is whole."""

    value: Tensor
    """[K, B] float64, without their weights; NaN where a reward failed."""
    weight: Tensor
    """[K] float64, the factor of each reward in the total."""
    group: Tensor
    """[B] int64, index of the prompt that each completion answers."""
    lengths: Tensor
    """[B] int64, |o_i|, drawn tokens."""
    segments: list[SegmentRewards | None]
    """[K] the segments of each reward; None for one that scores completions as a whole."""

    @property
    def total(self) -> Tensor:
        """[B] float64: R(q, o_i), the weighted sum; NaN where a reward failed."""
        return weighted_sum(self.weight, self.value)

    def plus(self, value: Tensor, weight: float) -> "RewardBatch":
        """These and one reward more, from its [B] values and its weight."""
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
        first_row = [0, *accumulate(len(batch.group) for batch in batches)]
        first_group = [0, *accumulate(int(b.group.max()) + 1 if len(b.group) else 0 for b in batches)]
        segments = []
        for rewards in zip(*(batch.segments for batch in batches), strict=True):
            scored = [(part, row) for part, row in zip(rewards, first_row, strict=False) if part is not None]
            segments.append(SegmentRewards.concat(scored))
        return cls(
            value=torch.cat([batch.value for batch in batches], dim=1),
            weight=batches[0].weight,
            group=torch.cat([batch.group + first for batch, first in zip(batches, first_group, strict=False)]),
            lengths=torch.cat([batch.lengths for batch in batches]),
            segments=segments,
        )


def weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """[K], [K, B] -> [B] the weighted sums; 0 where terms cancel and only their rounding is left."""
    terms = weight[:, None] * value
    total = terms.sum(0)
    return torch.where(total.abs() < EQUAL * terms.abs().sum(0), 0.0, total)
