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


@dataclass(slots=True)
class BatchSize:
    """The size of the batch of one optimizer update, over all ranks."""

    num_completions: int
    """B, the number of completions."""
    num_groups: int
    """The number of prompts."""
    num_tokens: int
    """The number of sampled tokens."""
    max_new_tokens: int | None = None
    """The number of tokens of the longest completion that the run allows."""

    @classmethod
    def of_all_ranks(cls, rollouts: Rollouts, counted: Tensor, max_new_tokens: int) -> "BatchSize":
        """Counts over the rollouts of all ranks what holds a counted token. Every rank must call it.

        Args:
            rollouts: The rollouts of this rank.
            counted: [N] bool, True for the tokens that count.
            max_new_tokens: The number of tokens of the longest completion that the run allows.
        """
        num_completions, num_groups = (
            int((segment_sum(counted.long(), rollouts.per_token(index), len(rollouts)) > 0).sum())
            for index in (rollouts.completion_of_row, rollouts.group)
        )
        sizes_by_rank = torch.tensor(ranks.gather((num_completions, num_groups, int(counted.sum()))))
        num_completions, num_groups, num_tokens = sizes_by_rank.sum(0).clamp(min=1).tolist()
        return cls(num_completions, num_groups, num_tokens, max_new_tokens)


class TokenWeighting(ABC):
    """Weighs tokens. The weight is the same for all tokens of a completion."""

    @abstractmethod
    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        """[B] float32 weights of completions.

        Args:
            lengths: [B] int64 |o_i|. It is 0 if the masks leave out every token of a completion and
                `objective.denominator` does not count these tokens.
            group: [B] int64, the index of each completion's prompt. Every group is complete.
            batch: The size of the whole batch.
        """

    def per_token(self, rollouts: Rollouts, counted: Tensor, batch: BatchSize) -> Tensor:
        """[N] float32 weights. |o_i| is the number of counted tokens ([N] bool) in all rows of a completion."""
        is_first_row = rollouts.is_first_row
        completion_of_token = rollouts.per_token(rollouts.completion_of_row)
        lengths = segment_sum(counted.long(), completion_of_token, int(is_first_row.sum()))
        weight = self(lengths, rollouts.group[is_first_row], batch)
        # A completion without counted tokens may have any weight, since masks multiply it by 0; but not infinity.
        weight = torch.where((lengths > 0) | weight.isfinite(), weight, 0.0)
        return rollouts.per_token(weight[rollouts.completion_of_row])


class SequenceMean(TokenWeighting):
    """GRPO: 1 / (B |o_i|): the mean over completions of the mean over their tokens (DeepSeekMath Eq. 3).

    Every completion counts the same, so a token of a short completion counts more.
    """

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return 1.0 / (batch.num_completions * lengths.clamp(min=1).float())


class TokenMean(TokenWeighting):
    """DAPO: 1 / sum_j |o_j|: every token of the batch counts the same (arXiv 2503.14476, Eq. 8).

    For long reasoning: good and bad patterns in long completions are not diluted.
    """

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return torch.full_like(lengths, 1.0 / batch.num_tokens, dtype=torch.float32)


class Unweighted(TokenWeighting):
    """Weighs every token 1, whatever the number and lengths of completions. The learning rate must fit the batch size.

    For `TargetProbability`, which decides how far each token moves, not how fast.
    """

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        return torch.ones_like(lengths, dtype=torch.float32)
