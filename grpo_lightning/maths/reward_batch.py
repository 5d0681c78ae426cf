"""The rewards of one exploration step as tensors, from which advantages are computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

EQUAL = 1e-9  # rewards that differ by at most this fraction of the larger are equal: sums round, 0.1 + 0.2 > 0.3


@dataclass(slots=True)
class SegmentRewards:
    """Rewards of S segments inside completions, ragged: a completion may have any number of them."""

    row: Tensor  # [S] int64, index of the completion that the segment belongs to
    end: Tensor  # [S] int64, index of the segment's last token among the drawn tokens of its completion
    value: Tensor  # [S] float64


@dataclass(slots=True)
class RewardBatch:
    """K rewards of B completions. Every group is whole; `total` is computed where it is not given."""

    value: Tensor  # [K, B] float64, without their weights; NaN where a reward failed
    weight: Tensor  # [K] float64, the factor of each reward in the total
    group: Tensor  # [B] int64, index of the prompt that each completion answers
    lengths: Tensor  # [B] int64, |o_i|, drawn tokens
    segments: list[SegmentRewards | None]  # [K] None for a reward that scores completions as a whole
    total: Tensor = None  # type: ignore[assignment]  # [B] float64: R(q, o_i); NaN where a reward failed
    columns: dict[str, Tensor] = field(default_factory=dict)  # [N] float32 log-probs that the advantage reads, by name

    def __post_init__(self) -> None:
        if self.total is None:
            self.total = weighted_sum(self.weight, self.value)

    def plus(self, value: Tensor, weight: float) -> "RewardBatch":
        """These and one reward more, from its [B] values and its weight."""
        values = torch.cat([self.value, value[None].to(self.value)])
        weights = torch.cat([self.weight, self.weight.new_tensor([weight])])
        return RewardBatch(values, weights, self.group, self.lengths, [*self.segments, None], columns=self.columns)

    @classmethod
    def concat(cls, batches: Sequence["RewardBatch"]) -> "RewardBatch":
        """The same rewards of several batches, whose groups are all different ones."""
        first_row = [0, *accumulate(len(batch.group) for batch in batches)]
        first_group = [0, *accumulate(int(b.group.max()) + 1 if len(b.group) else 0 for b in batches)]
        segments: list[SegmentRewards | None] = []
        for parts in zip(*(batch.segments for batch in batches), strict=True):
            scored = [
                (part.row + row, part.end, part.value) for part, row in zip(parts, first_row, strict=False) if part
            ]
            segments.append(SegmentRewards(*map(torch.cat, zip(*scored, strict=True))) if scored else None)
        return cls(
            value=torch.cat([batch.value for batch in batches], dim=1),
            weight=batches[0].weight,
            group=torch.cat([batch.group + first for batch, first in zip(batches, first_group, strict=False)]),
            lengths=torch.cat([batch.lengths for batch in batches]),
            segments=segments,
            total=torch.cat([batch.total for batch in batches]),
            columns={name: torch.cat([batch.columns[name] for batch in batches]) for name in batches[0].columns},
        )


def weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """[K], [K, B] -> [B] the weighted sums; 0 where terms cancel and only their rounding is left."""
    terms = weight[:, None] * value
    total = terms.sum(0)
    return torch.where(total.abs() < EQUAL * terms.abs().sum(0), 0.0, total)
