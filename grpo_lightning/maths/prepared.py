"""Numbers per token that are known before the passes, some of them from the tokens of all ranks."""

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.rollouts import Rollouts


class Prepared:
    """A part of the objective that may compute columns once per step, before the passes."""

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Columns [N] float32 by name, computed from the whole groups of this rank; here none.

        Every rank calls it, also one without completions, whose `sampler_logp` is None: it may ask the others
        (`gathered`). In a call, `rollouts.columns` has the columns of the micro-batch's tokens: zeros in a
        micro-batch of weight 0, which fills up a rank with less to do.
        """
        return {}


def gathered(values: Tensor) -> Tensor:
    """[n] the numbers of all ranks, on the CPU, from [N] of this one. Every rank must call it."""
    return torch.cat(ranks.gather(values.cpu()))


def rank_in_step(values: Tensor) -> Tensor:
    """[N] the fraction of the numbers of all ranks that are smaller. Every rank must call it."""
    values_of_step = gathered(values).sort().values
    return torch.searchsorted(values_of_step, values) / len(values_of_step)
