"""The rewards of one exploration step as tensors: the input of advantage estimators."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import starts

EQUAL = 1e-9
"""Rewards that differ by at most this fraction of the larger reward are equal: sums round, 0.1 + 0.2 > 0.3."""


@dataclass(slots=True)
class SegmentRewards:
    """Rewards of S segments inside completions; a completion may have any number of segments."""

    row: Tensor
    """[S] int64, the index of the completion that the segment belongs to."""
    end: Tensor
    """[S] int64, the index of the segment's last token among the sampled tokens of its completion."""
    value: Tensor
    """[S] float64, the reward of the segment."""

    @classmethod
    def concat(cls, batches: Sequence["SegmentRewards | None"], first_rows: Tensor) -> "SegmentRewards | None":
        """Concatenates segments of batches of completions, where `first_rows` is each batch's first completion."""
        pairs = [(batch, first_row) for batch, first_row in zip(batches, first_rows, strict=True) if batch]
        if not pairs:
            return None
        return cls(
            row=torch.cat([batch.row + first_row for batch, first_row in pairs]),
            end=torch.cat([batch.end for batch, _ in pairs]),
            value=torch.cat([batch.value for batch, _ in pairs]),
        )


@dataclass(slots=True)
class RewardBatch:
    """K rewards of B completions. Every group is complete. `total` is computed unless it is given."""

    value: Tensor
    """[K, B] float64, the rewards before their weights; NaN if a reward failed, or does not apply."""
    weight: Tensor
    """[K] float64, the factor of each reward in the total."""
    group: Tensor
    """[B] int64, the index of each completion's prompt."""
    lengths: Tensor
    """[B] int64, |o_i|, the number of sampled tokens."""
    segments: list[SegmentRewards | None]
    """[K] the segments that each reward scored; None for a reward that scores whole completions."""
    total: Tensor = None  # type: ignore[assignment]
    """[B] float64, R(q, o_i), the weighted sum of the rewards; NaN if a reward failed."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[N] float32 log-probs that the advantage estimator reads, by name."""

    def __post_init__(self) -> None:
        if self.total is None:
            self.total = weighted_sum(self.weight, self.value)

    def plus(self, value: Tensor, weight: float) -> "RewardBatch":
        """Returns these rewards and a further reward, from its [B] values and its weight."""
        values = torch.cat([self.value, value[None].to(self.value)])
        weights = torch.cat([self.weight, self.weight.new_tensor([weight])])
        # A reward that does not apply to a completion is NaN too, and adds nothing.
        total = weighted_sum(weights, values.nan_to_num()).masked_fill(self.total.isnan(), torch.nan)
        segments = [*self.segments, None]
        return RewardBatch(values, weights, self.group, self.lengths, segments, total, self.columns)

    @classmethod
    def concat(cls, batches: Sequence["RewardBatch"]) -> "RewardBatch":
        """Concatenates batches with the same rewards and different prompts."""
        # Indices of rows and of prompts count on from one batch to the next.
        first_rows = starts(torch.tensor([len(batch.group) for batch in batches]))
        num_groups = torch.tensor([int(batch.group.max()) + 1 if len(batch.group) else 0 for batch in batches])
        segments_by_reward = zip(*(batch.segments for batch in batches), strict=True)
        return cls(
            value=torch.cat([batch.value for batch in batches], dim=1),
            weight=batches[0].weight,
            group=torch.cat([batch.group + first for batch, first in zip(batches, starts(num_groups), strict=True)]),
            lengths=torch.cat([batch.lengths for batch in batches]),
            segments=[SegmentRewards.concat(segments, first_rows) for segments in segments_by_reward],
            total=torch.cat([batch.total for batch in batches]),
            columns={name: torch.cat([batch.columns[name] for batch in batches]) for name in batches[0].columns},
        )


def weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """[B] weighted sums of [K, B] values with [K] weights; 0 where terms cancel and only their rounding remains."""
    terms = weight[:, None] * value
    total = terms.sum(0)
    return torch.where(total.abs() < EQUAL * terms.abs().sum(0), 0.0, total)
