"""What one Lightning batch is: the rollouts of one optimizer update, cut into micro-batches."""

from dataclasses import dataclass

import torch

from grpo_lightning.explorer import Exploration
from grpo_lightning.ragged import segments
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.stopping import Passes


@dataclass(slots=True)
class Minibatch:
    """The rollouts of one optimizer update on this rank. The optimizer steps once, after the last pack's backward."""

    packs: list[Rollouts]
    """Micro-batches of at most `max_tokens`; the same number on every rank, so that all ranks sync alike."""
    on_policy: bool
    """Whether π_θ is still π_old, so that every ratio should be 1."""
    exploration: Exploration
    """Where the rollouts come from; `Rollouts.row` counts in it."""
    passes: Passes
    """The step's updates so far. Once a stop rule has ended them this minibatch changes nothing."""

    def to(self, device: torch.device | str) -> "Minibatch":
        """A copy on `device`; dtypes stay."""
        return Minibatch([pack.to(device) for pack in self.packs], self.on_policy, self.exploration, self.passes)


def without_idle_rows(rollouts: Rollouts) -> Rollouts:
    """Leaves out completions without a token that has both Â and weight: without a KL term they have no gradient.

    Their weight has been counted, so the gradient stays what it was. One row always stays: there must be a gradient for
    the optimizer, if a zero one.
    """
    row = segments(rollouts.lengths)
    moves = torch.zeros(len(rollouts), dtype=torch.bool, device=rollouts.lengths.device)
    moves[row[(rollouts.advantage != 0) & (rollouts.weight != 0)]] = True
    moves[0] |= ~moves.any()
    return rollouts.select(moves.nonzero().squeeze(1))


def idle_pack(rollouts: Rollouts) -> Rollouts:
    """The first row with weight 0: a forward and a backward that change nothing, for a rank with less to do.

    Fields that are not known yet are 0.
    """
    row = rollouts.select(torch.zeros(1, dtype=torch.int64, device=rollouts.lengths.device))
    zeros = torch.zeros_like(row.weight)
    row.weight = zeros
    for name in ("old_logp", "ref_logp", "entropy_rank", "logp_low", "logp_high"):
        if getattr(row, name) is None:
            setattr(row, name, zeros)
    return row
