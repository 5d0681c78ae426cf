"""The rows of each update, those that have a gradient, and a micro-batch for a rank with less to do than others."""

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
    ids_by_rank = ranks.gather({*prompt_ids})
    all_ids = sorted({id for ids in ids_by_rank for id in ids})
    minibatch_by_id = {id: index * num_minibatches // len(all_ids) for index, id in enumerate(all_ids)}
    return torch.tensor([minibatch_by_id[id] for id in prompt_ids], dtype=torch.int64)


def rows_with_gradient(rollouts: Rollouts) -> Tensor:
    """[r] int64, the rows with a token that has both Â and weight: without a KL term the others have no gradient.

    Where no rank has such a row, one is kept, of weight if there is any: the optimizer must have a gradient, if a zero
    one. Every rank must call it.
    """
    row = segments(rollouts.lengths)
    has_weight = rollouts.weight != 0
    with_gradient = row[has_weight & (rollouts.advantage != 0)].unique()
    if any(ranks.gather(len(with_gradient) > 0)):
        return with_gradient
    for rows in (row[has_weight].unique(), torch.arange(len(rollouts))):
        has_rows = ranks.gather(len(rows) > 0)
        if any(has_rows):
            return rows[: int(ranks.rank() == has_rows.index(True))]
    return with_gradient


def idle_micro_batch(temperature: float) -> Rollouts:
    """One token of weight 0: a forward and a backward that change nothing, for a rank with less to do.

    Every number is 0: whatever reads the micro-batches of other ranks finds the same here. Its row is -1: no
    completion's.
    """
    ones = torch.ones(1, dtype=torch.int64)
    zeros = torch.zeros(1, dtype=torch.int64)
    columns = {name: torch.zeros(1, dtype=torch.float32) for name in Rollouts.NAMES}
    return Rollouts(zeros, ones, zeros, zeros, ones, row=-ones, columns=columns, temperature=temperature)
