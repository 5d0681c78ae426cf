"""What one Lightning batch is: the rollouts of one optimizer update, cut into micro-batches."""

from dataclasses import dataclass

import torch

from grpo_lightning.explorer import Exploration
from grpo_lightning.rollouts import Rollouts


@dataclass(slots=True)
class Minibatch:
    """The rollouts of one optimizer update on this rank. The optimizer steps once, after the last pack's backward."""

    packs: list[Rollouts]
    """Micro-batches of at most `max_tokens`; the same number on every rank, so that all ranks sync alike."""
    on_policy: bool
    """Whether π_θ is still π_old, so that every ratio should be 1."""
    exploration: Exploration
    """Where the rollouts come from; `Rollouts.row` counts in it."""

    def to(self, device: torch.device | str) -> "Minibatch":
        """A copy on `device`; dtypes stay."""
        return Minibatch([pack.to(device) for pack in self.packs], self.on_policy, self.exploration)


def without_idle_rows(rollouts: Rollouts) -> Rollouts:
    """Leaves out completions whose advantage is 0 throughout: where J has no KL term they have no gradient.

    Their weight has been counted, so the gradient stays what it was. One row always stays: there must be a gradient for
    the optimizer, if a zero one.
    """
    row = torch.arange(len(rollouts), device=rollouts.lengths.device).repeat_interleave(rollouts.lengths)
    moves = torch.zeros(len(rollouts), dtype=torch.bool, device=rollouts.lengths.device)
    moves[row[rollouts.advantage != 0]] = True
    moves[0] |= ~moves.any()
    return rollouts.select(moves.nonzero().squeeze(1))


def idle_pack(pack: Rollouts) -> Rollouts:
    """One row of `pack` with weight 0: a forward and a backward that change nothing, for a rank with less to do."""
    row = pack.select(torch.zeros(1, dtype=torch.int64, device=pack.lengths.device))
    row.weight = torch.zeros_like(row.weight)
    return row
