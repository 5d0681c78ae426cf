"""Weightings: how tokens are averaged, said as one weight a token and fixed before the optimisation passes.

Every loss of the literature is sum_t weight_t * (surrogate_t - beta * kl_t); they differ in `weight`. A weight is
computed from the whole batch of one optimizer update over all ranks, so the gradients of micro-batches and of ranks
simply add up.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import segment_sum
from grpo_lightning.types import UsageError


@dataclass(slots=True)
class BatchSize:
    """The batch of one optimizer update, over all ranks."""

    sequences: int
    groups: int
    tokens: int
    max_new_tokens: int | None = None
    """The longest completion that the run allows."""


class TokenWeighting(ABC):
    """The weight of a token, which is the same for all tokens of a completion."""

    @abstractmethod
    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        """[B] lengths, [B] groups (whole ones), the whole batch's size -> [B] float32, the weight of a token."""


class SequenceMean(TokenWeighting):
    """GRPO: 1 / (B |o_i|): the mean over completions of the mean over their tokens (DeepSeekMath Eq. 3)."""

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return 1.0 / (batch.sequences * lengths.float())


class TokenMean(TokenWeighting):
    """DAPO: 1 / sum_j |o_j|: every token of the batch counts the same (arXiv 2503.14476, Eq. 8)."""

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return torch.full_like(lengths, 1.0 / batch.tokens, dtype=torch.float32)


class FixedLength(TokenWeighting):
    """Dr. GRPO: 1 / (B L): no completion's own length enters, so long wrong ones are not favoured (arXiv 2503.20783).

    Args:
        length: L. None is the longest completion allowed, `sampling.max_new_tokens`.
    """

    def __init__(self, length: int | None = None) -> None:
        if length is not None and length < 1:
            raise UsageError(f"length={length} of FixedLength: give 1 or more, or null for max_new_tokens")
        self.length = length

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        length = batch.max_new_tokens if self.length is None else self.length
        assert length is not None, "give length, or a BatchSize with max_new_tokens"
        return torch.full_like(lengths, 1.0 / (batch.sequences * length), dtype=torch.float32)


class GroupTokenMean(TokenWeighting):
    """1 / (groups * tokens of the group): the mean over groups of the mean over a group's tokens.

    Every question counts the same however long its answers are, and inside a group every token does.
    """

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        tokens = segment_sum(lengths, group, int(group.max()) + 1 if len(group) else 0)[group]
        return 1.0 / (batch.groups * tokens.float())


class Unweighted(TokenWeighting):
    """1: neither the number of completions nor their lengths enter; the learning rate must know the batch's size."""

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return torch.ones_like(lengths, dtype=torch.float32)
