"""Columns that are computed once per step, before the passes, some of them from the tokens of all ranks."""

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.rollouts import Rollouts


class Prepared:
    """Base of the parts of the objective that may compute columns once per step, before the passes."""

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Computes [N] float32 columns by name from the complete groups of this rank; by default none.

        Every rank calls it, even without completions (`sampler_logp` is then None), so that it may gather numbers of
        all ranks (`gathered`). In updates, `rollouts.columns` holds these columns for the tokens of a micro-batch. They
        are zero in an idle micro-batch, which has weight 0 and fills up a rank with less to do.
        """
        return {}


def gathered(values: Tensor) -> Tensor:
    """[n] the numbers of all ranks, on the CPU, from the [N] numbers of this rank. Every rank must call it."""
    return torch.cat(ranks.gather(values.cpu()))


def rank_in_step(values: Tensor) -> Tensor:
    """[N] float32, the fraction of the numbers of all ranks that are smaller than each. Every rank must call it."""
    values_of_step = gathered(values).sort().values
    return torch.searchsorted(values_of_step, values) / len(values_of_step)
