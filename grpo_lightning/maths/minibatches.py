"""Cuts a step into minibatches: the rows of each update, the rows with a gradient, and idle micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.ragged import segments
from grpo_lightning.maths.rollouts import Rollouts


def minibatch_of_rows(prompt_ids: Sequence[int], num_minibatches: int) -> Tensor:
    """[B] int64, the minibatch of each row.

    The prompts of all ranks are cut into equal parts in the order of their ids, so that each minibatch holds the same
    prompts for any number of ranks. Every rank must call it.
    """
    ids_by_rank = ranks.gather({*prompt_ids})
    all_ids = sorted({id for ids in ids_by_rank for id in ids})
    minibatch_by_id = {id: index * num_minibatches // len(all_ids) for index, id in enumerate(all_ids)}
    return torch.tensor([minibatch_by_id[id] for id in prompt_ids], dtype=torch.int64)


def rows_with_gradient(rollouts: Rollouts) -> Tensor:
    """[r] int64, the rows with a token that has both Â and weight: without a KL term other rows have no gradient.

    If no rank has such a row, one rank keeps one row, with weight if possible: the optimizer needs a gradient, even if
    it is zero. Every rank must call it.
    """
    row_of_token = segments(rollouts.lengths)
    has_weight = rollouts.weight != 0
    with_gradient = row_of_token[has_weight & (rollouts.advantage != 0)].unique()
    if any(ranks.gather(len(with_gradient) > 0)):
        return with_gradient

    # The first rank that has a row with weight keeps its first such row, or else the first rank that has any row.
    for rows in (row_of_token[has_weight].unique(), torch.arange(len(rollouts))):
        has_rows = ranks.gather(len(rows) > 0)
        if any(has_rows):
            return rows[: int(ranks.rank() == has_rows.index(True))]
    return with_gradient


def idle_micro_batch(temperature: float) -> Rollouts:
    """Returns one token of weight 0: a forward and a backward that change nothing, for a rank with less to do.

    It has every column that micro-batches of other ranks have, with zeros. Its `sample_index` is -1, which is the index
    of no sample.
    """
    ones = torch.ones(1, dtype=torch.int64)
    zeros = torch.zeros(1, dtype=torch.int64)
    columns = {name: torch.zeros(1, dtype=torch.float32) for name in Rollouts.NAMES}
    return Rollouts(zeros, ones, zeros, zeros, ones, sample_index=-ones, columns=columns, temperature=temperature)
