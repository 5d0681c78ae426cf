"""Log π_old of a step's rollouts, without a forward that nothing reads."""

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
    """[N] log π_old of every token, if something reads it, and the number of minibatches without it: 0 or 1.

    | rollouts | log π_old | computed for |
    |---|---|---|
    | of an earlier version | recorded by their sampler, unless π_old is proximal | none |
    | others, if something reads it before the updates | computed by `old_policy` | all rows |
    | others, one update in all | computed by that update, in which π_θ is π_old | none |
    | others | the first minibatch's by its first update, the others' now | all minibatches but the first |

    Args:
        old_policy: π_old.
        needed_first: True if a surrogate, a KL penalty or an advantage reads log π_old before the updates.
        rollouts: The step's rollouts.
        packer: Makes the forwards.
        cut: The rows of each micro-batch of each minibatch.
        is_late: True for rollouts of an earlier version.
        one_update: True if the step has one update in all.
    """
    if is_late and not old_policy.is_proximal:
        return torch.zeros(0) if rollouts.sampler_logp is None else rollouts.sampler_logp, 0

    # The first update starts from π_old, if π_old is the policy: its forward computes the first minibatch's.
    num_missing = int(old_policy.is_policy)
    if one_update and num_missing and not needed_first:
        return None, 1
    minibatches = cut[0 if needed_first else num_missing :]
    micro_batches = [rows for minibatch in minibatches for rows in minibatch]

    # An advantage reads the rows that no update learns from, too.
    if needed_first:
        is_unused = torch.ones(len(rollouts), dtype=torch.bool)
        is_unused[torch.cat([torch.empty(0, dtype=torch.int64), *micro_batches])] = False
        unused_rows = is_unused.nonzero().squeeze(1)
        if len(unused_rows):
            rows_of_micro_batches = packer.rows_of_micro_batches(rollouts.select(unused_rows))
            micro_batches += [unused_rows[rows] for rows in rows_of_micro_batches]

    with torch.no_grad():
        logp = packer.per_token(rollouts, micro_batches, lambda micro_batch: old_policy(packer.policy, micro_batch))
    return logp, num_missing
