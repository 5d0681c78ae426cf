"""Numbers per token of rollouts that are too many for one forward, by micro-batch; all ranks make as many."""

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

Rows = Tensor  # [r] int64, some rows of the rollouts


@dataclass(slots=True, frozen=True)
class Packer:
    """Cuts rollouts, which stay on the CPU, into packs for the device."""

    policy: Policy  # its forward takes the micro-batches
    max_tokens: int  # in one forward; 0 sets no limit
    temperature: float  # that of the rollouts

    @property
    def idle(self) -> Rollouts:
        """The pack of ranks that have fewer than others."""
        return idle_micro_batch(self.temperature).to(self.policy.device)

    def rows_of_micro_batches(self, rollouts: Rollouts) -> list[Rows]:
        """The rows of each micro-batch of some rollouts."""
        return rollouts.sizes.micro_batches(self.max_tokens, self.policy.compute.shares_prefix)

    def entropy_rank(self, rollouts: Rollouts) -> Tensor:
        """[N] rank of each token by entropy among those of all ranks, as a fraction of them."""
        return rank_in_step(
            self.per_token(rollouts, self.rows_of_micro_batches(rollouts), lambda p: self.policy(p).entropy)
        )

    def over(
        self, rollouts: Rollouts, micro_batches: Sequence[Rows], function: Callable[[Rollouts], T]
    ) -> Iterator[tuple[Tensor, T]]:
        """Yields the indices of the tokens of each micro-batch, and what `function` returns for it by a forward."""
        # Ranks with sharded weights meet in every forward: each makes as many.
        num_idle = max(ranks.gather(len(micro_batches))) - len(micro_batches)
        for rows in micro_batches:
            yield take(rows, rollouts.lengths), function(rollouts.select(rows).to(self.policy.device))
        for _ in range(num_idle):
            function(self.idle)

    def per_token(
        self, rollouts: Rollouts, micro_batches: Sequence[Rows], function: Callable[[Rollouts], Tensor]
    ) -> Tensor:
        """[N] what `function` returns, in the order of the rollouts; 0 where no micro-batch is."""
        found = torch.zeros(rollouts.num_tokens, dtype=torch.float32)
        for tokens, values in self.over(rollouts, micro_batches, function):
            found[tokens] = values.cpu()
        return found
