"""Log π_old of a step's rollouts, by no more forwards than something reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.packer import Packer, Rows
from grpo_lightning.policy.snapshots import PolicySnapshot


def old_policy_logp(
    old_policy: PolicySnapshot,
    needed_first: bool,
    rollouts: Rollouts,
    packer: Packer,
    cut: Sequence[Sequence[Rows]],
    is_late: bool,
    one_update: bool,
) -> tuple[Tensor | None, int]:
    """[N] log π_old of every token, where something reads it, and the number of minibatches that lack it: 0 or 1.

    | rollouts | log π_old | computed for |
    |---|---|---|
    | of an earlier version | what their sampler recorded, unless π_old is proximal | none |
    | others, where something reads it before the updates | that of `old_policy` | all rows |
    | others, one update in all | found by that update, where π_θ is π_old | none |
    | others | the first minibatch's by its first update, the others' now | all minibatches but the first |

    What reads it before the updates (`needed_first`) is a surrogate, a KL penalty or an advantage. `cut` has the rows
    of each micro-batch of each minibatch.
    """
    if is_late and not old_policy.is_proximal:
        return torch.zeros(0) if rollouts.sampler_logp is None else rollouts.sampler_logp, 0
    unknown = int(old_policy.is_policy)
    if one_update and unknown and not needed_first:
        return None, 1
    micro_batches = [micro_batch for minibatch in cut[0 if needed_first else unknown :] for micro_batch in minibatch]
    if needed_first:  # rows that no update learns from count too
        left = torch.ones(len(rollouts), dtype=torch.bool)
        left[torch.cat([torch.empty(0, dtype=torch.int64), *micro_batches])] = False
        rest = left.nonzero().squeeze(1)
        micro_batches += (
            [rest[micro_batch] for micro_batch in packer.rows_of_micro_batches(rollouts.select(rest))]
            if len(rest)
            else []
        )
    with torch.no_grad():
        return packer.per_token(
            rollouts, micro_batches, lambda micro_batch: old_policy(packer.policy, micro_batch)
        ), unknown
