"""What one Lightning batch is: the rollouts of one optimizer update, cut into packs."""

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import segments
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.stopping import Passes
from grpo_lightning.training.explorer import Exploration


class Minibatch:
    """The rollouts of one optimizer update on this rank. The optimizer steps once, after the last pack's backward.

    A plain class on purpose: Lightning looks into every dataclass and list of a batch, for tensors to cast.

    Args:
        packs: At most `max_tokens` each, on the module's device; the same number on every rank, so that all ranks sync
            alike.
        on_policy: Whether π_θ is still π_old, so that every ratio is 1.
        exploration: Where the rollouts come from; `Rollouts.row` counts in it.
        passes: The step's updates so far. Once a stop rule has ended them this minibatch changes nothing.
    """

    def __init__(self, packs: list[Rollouts], on_policy: bool, exploration: Exploration, passes: Passes) -> None:
        self.packs = packs
        self.on_policy = on_policy
        self.exploration = exploration
        self.passes = passes

    def to(self, device: torch.device | str) -> "Minibatch":
        """Itself: its packs were put on the device when they were cut, and each is used in every pass."""
        return self


def moving_rows(rollouts: Rollouts) -> Tensor:
    """[r] completions with a token that has both Â and weight: without a KL term the others have no gradient.

    The weight of the others has been counted, so the gradient stays what it was without them. One row is always
    there: the optimizer must have a gradient, if a zero one.
    """
    row = segments(rollouts.lengths)
    moves = torch.zeros(len(rollouts), dtype=torch.bool)
    moves[row[(rollouts.advantage != 0) & (rollouts.weight != 0)]] = True
    moves[0] |= ~moves.any()
    return moves.nonzero().squeeze(1)


def idle_pack(rollouts: Rollouts) -> Rollouts:
    """The first row with weight 0, for a rank with less to do: its forward and backward change nothing.

    Log-probs that are not known yet are 0. Columns that are prepared later are for the caller to add, as zeros.
    """
    row = rollouts.select(torch.zeros(1, dtype=torch.int64, device=rollouts.lengths.device))
    zeros = torch.zeros_like(row.weight)
    row.weight = row.advantage = zeros
    row.columns = dict.fromkeys(row.columns, zeros)
    row.old_logp = zeros if row.old_logp is None else row.old_logp
    row.ref_logp = zeros if row.ref_logp is None else row.ref_logp
    return row
