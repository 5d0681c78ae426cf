"""What goes into the packs of an update: the rows that have a gradient, and a pack for a rank with less to do."""

from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import segments
from grpo_lightning.maths.rollouts import Rollouts


def moving_rows(rollouts: Rollouts) -> Tensor:
    """[r] int64, the rows with a token that has both Â and weight: without a KL term the others have no gradient.

    The weights were computed with the other rows, so the gradient stays what it was. One row is always kept, since
    the optimizer must have a gradient, if a zero one.
    """
    row = segments(rollouts.lengths)
    moves = torch.zeros(len(rollouts), dtype=torch.bool)
    moves[row[(rollouts.advantage != 0) & (rollouts.weight != 0)]] = True
    moves[0] |= ~moves.any()
    return moves.nonzero().squeeze(1)


def idle_pack(temperature: float) -> Rollouts:
    """One token of weight 0: a forward and a backward that change nothing, for a rank with less to do.

    Every number is 0, so that whatever reads the packs of other ranks finds the same here. Its row is -1: it is of no
    completion.

    Args:
        temperature: The temperature of the step's rollouts.
    """
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    numbers: dict[str, Any] = {name: torch.zeros(1, dtype=torch.float32) for name in Rollouts.FLOATS}
    return Rollouts(
        prompt_token_ids=zero,
        prompt_lengths=one,
        group=zero,
        token_ids=zero,
        lengths=one,
        row=-one,
        **numbers,
        temperature=temperature,
    )
