"""Cuts rollouts into micro-batches, and computes columns by a forward of each; all ranks make as many forwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.minibatches import idle_micro_batch
from grpo_lightning.maths.prepared import rank_in_step
from grpo_lightning.maths.ragged import take
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.policy import Policy

T = TypeVar("T")

Rows = Tensor
"""[r] int64 rows of the rollouts that make a micro-batch."""


@dataclass(slots=True, frozen=True)
class MicroBatcher:
    """Cuts rollouts, which stay on the CPU, into micro-batches, and runs functions over these on the device."""

    policy: Policy
    """The policy whose forward takes the micro-batches."""
    max_tokens: int
    """Largest number of tokens in one forward; 0 sets no limit."""
    temperature: float
    """The temperature of the rollouts."""

    @property
    def idle(self) -> Rollouts:
        """The micro-batch of weight 0 for ranks that have fewer micro-batches than others."""
        return idle_micro_batch(self.temperature).to(self.policy.device)

    def rows_of_micro_batches(self, rollouts: Rollouts) -> list[Rows]:
        """Returns the rows of each micro-batch of `rollouts`."""
        return rollouts.sizes.micro_batches(self.max_tokens, self.policy.compute.shares_prefix)

    def entropy_rank(self, rollouts: Rollouts) -> Tensor:
        """[N] the fraction of the tokens, of all processes, whose entropy is smaller than the entropy of each token."""
        rows = self.rows_of_micro_batches(rollouts)
        return rank_in_step(self.per_token(rollouts, rows, lambda micro_batch: self.policy(micro_batch).entropy))

    def over(
        self, rollouts: Rollouts, micro_batches: Sequence[Rows], function: Callable[[Rollouts], T]
    ) -> Iterator[tuple[Tensor, T]]:
        """Yields, for each micro-batch, the indices of its tokens and the result of `function`: of a forward."""
        # With sharded weights every forward needs all ranks, so each rank makes as many forwards as the others.
        num_idle = max(ranks.gather(len(micro_batches))) - len(micro_batches)
        for rows in micro_batches:
            yield take(rows, rollouts.lengths), function(rollouts.select(rows).to(self.policy.device))
        for _ in range(num_idle):
            function(self.idle)

    def per_token(
        self, rollouts: Rollouts, micro_batches: Sequence[Rows], function: Callable[[Rollouts], Tensor]
    ) -> Tensor:
        """[N] float32 results of `function`, in the order of the rollouts; 0 for rows that are in no micro-batch."""
        result = torch.zeros(rollouts.num_tokens, dtype=torch.float32)
        for tokens, values in self.over(rollouts, micro_batches, function):
            result[tokens] = values.cpu()
        return result
