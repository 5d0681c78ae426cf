"""Weightings: the average over tokens, as one weight per token that is fixed before the optimisation passes.

A weight is computed from the whole batch of one optimizer update over all ranks, so the gradients of micro-batches
and of ranks simply add up.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.ragged import segment_sum
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import at_least


@dataclass(slots=True)
class BatchSize:
    """The batch of one optimizer update, over all ranks."""

    num_completions: int
    num_groups: int
    num_tokens: int  # drawn tokens
    max_new_tokens: int | None = None  # the longest completion that the run allows

    @classmethod
    def of_all_ranks(cls, rollouts: Rollouts, counted: Tensor, max_new_tokens: int) -> "BatchSize":
        """The sizes of the rollouts of all ranks, over the tokens that count, [N] bool. Every rank must call it."""
        completions, groups = (
            int((segment_sum(counted.long(), rollouts.spread(index), len(rollouts)) > 0).sum())
            for index in (rollouts.completion, rollouts.group)
        )
        sizes = torch.tensor(ranks.gather((completions, groups, int(counted.sum())))).sum(0)
        completions, groups, tokens = sizes.clamp(min=1).tolist()
        return cls(completions, groups, tokens, max_new_tokens)


class TokenWeighting(ABC):
    """The weight per token, which is the same for all tokens of a completion."""

    @abstractmethod
    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        """[B] float32 weights from [B] |o_i|, [B] indices of prompts (every group is whole), and the whole batch.

        |o_i| is 0 where the masks leave out all tokens of a completion and `objective.denominator` counts what is left.
        """

    def per_token(self, rollouts: Rollouts, counted: Tensor, batch: BatchSize) -> Tensor:
        """[N] float32 weights; |o_i| are the tokens that count, [N] bool, in all pieces of a completion."""
        lengths = segment_sum(counted.long(), rollouts.spread(rollouts.completion), int(rollouts.begins.sum()))
        weight = self(lengths, rollouts.group[rollouts.begins], batch)
        # The masks make 0 of whatever a completion without counted tokens gets, but for what is infinite.
        weight = torch.where((lengths > 0) | weight.isfinite(), weight, 0.0)
        return rollouts.spread(weight[rollouts.completion])


class SequenceMean(TokenWeighting):
    """GRPO: 1 / (B |o_i|): the mean over completions of the mean over their tokens (DeepSeekMath Eq. 3).

    Every completion counts the same, so a token of a short one counts more.
    """

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return 1.0 / (batch.num_completions * lengths.clamp(min=1).float())


class TokenMean(TokenWeighting):
    """DAPO: 1 / sum_j |o_j|: every token of the batch counts the same (arXiv 2503.14476, Eq. 8).

    For long reasoning: good and bad patterns in long completions are not diluted.
    """

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return torch.full_like(lengths, 1.0 / batch.num_tokens, dtype=torch.float32)


class FixedLength(TokenWeighting):
    """Dr. GRPO: 1 / (B L), with a constant L (arXiv 2503.20783).

    A completion's own length does not enter, so long wrong answers are not punished less per token.

    Args:
        length: L. None is the longest completion allowed, `sampling.max_new_tokens`.
    """

    def __init__(self, length: int | None = None) -> None:
        at_least("length", length, 1, "FixedLength")
        self.length = length

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        length = batch.max_new_tokens if self.length is None else self.length
        assert length is not None, "give length, or a BatchSize with max_new_tokens"
        return torch.full_like(lengths, 1.0 / (batch.num_completions * length), dtype=torch.float32)


class Unweighted(TokenWeighting):
    """1: neither the number of completions nor their lengths enter. Choose the learning rate for the batch size.

    For `TargetProbability`, which says how far each token goes, not how fast.
    """

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return torch.ones_like(lengths, dtype=torch.float32)
