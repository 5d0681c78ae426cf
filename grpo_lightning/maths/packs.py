"""The rows of an update that have a gradient, and a pack for a rank with less to do than others."""

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.ragged import segments
from grpo_lightning.maths.rollouts import Rollouts


def moving_rows(rollouts: Rollouts) -> Tensor:
    """[r] int64, the rows with a token that has both Â and weight: without a KL term the others have no gradient.

    Where no rank has such a row, the first row of all is kept: the optimizer must have a gradient, if a zero one.
    Every rank must call it.
    """
    row = segments(rollouts.lengths)
    moves = torch.zeros(len(rollouts), dtype=torch.bool)
    moves[row[(rollouts.advantage != 0) & (rollouts.weight != 0)]] = True
    everyone = ranks.gather((int(moves.sum()), len(rollouts)))
    if not any(moving for moving, _ in everyone):
        moves[:1] = ranks.rank() == next((rank for rank, (_, count) in enumerate(everyone) if count), 0)
    return moves.nonzero().squeeze(1)


def idle_pack(temperature: float) -> Rollouts:
    """One token of weight 0: a forward and a backward that change nothing, for a rank with less to do.

    Every number is 0: whatever reads the packs of other ranks finds the same here. Its row is -1: no completion's.
    """
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    columns = {name: torch.zeros(1, dtype=torch.float32) for name in Rollouts.NAMES}
    return Rollouts(zero, one, zero, zero, one, row=-one, columns=columns, temperature=temperature)
