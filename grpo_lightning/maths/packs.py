"""The rows of each update, those that have a gradient, and a pack for a rank with less to do than others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.ragged import segments
from grpo_lightning.maths.rollouts import Rollouts


def minibatch_of_rows(prompt_ids: Sequence[int], num_minibatches: int) -> Tensor:
    """[B] int64, the minibatch of each row: the prompts of all ranks, in order of their ids, are cut into equal parts.

    Every rank must call it. So each minibatch holds the same prompts for any number of ranks.
    """
    everyone = sorted({id for ids in ranks.gather({*prompt_ids}) for id in ids})
    minibatch = {id: index * num_minibatches // len(everyone) for index, id in enumerate(everyone)}
    return torch.tensor([minibatch[id] for id in prompt_ids], dtype=torch.int64)


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
