"""Log π_old of a step's rollouts. No forward is made for log-probs that are known or that nothing reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.micro_batcher import MicroBatcher, Rows
from grpo_lightning.policy.snapshots import PolicySnapshot


def old_policy_logp(
    old_policy: PolicySnapshot,
    is_read_before_updates: bool,
    rollouts: Rollouts,
    micro_batcher: MicroBatcher,
    rows_of_micro_batches: Sequence[Sequence[Rows]],
    is_late: bool,
    has_one_update: bool,
) -> tuple[Tensor | None, int]:
    """[N] log π_old of every token, if something reads it, and the number of minibatches without it: 0 or 1.

    | rollouts | log π_old | computed for |
    |---|---|---|
    | of an earlier version | recorded by their sampler, unless π_old is proximal | none |
    | others, if something reads it before the updates | computed by `old_policy` | all rows |
    | others, one update in all | computed by that update, in which π_θ is π_old | none |
    | others | computed by the first update for its minibatch, by `old_policy` for the others | all but the first |

    Args:
        old_policy: π_old.
        is_read_before_updates: True if a surrogate, a KL penalty or an advantage reads log π_old before the updates.
        rollouts: The step's rollouts.
        micro_batcher: Makes the forwards.
        rows_of_micro_batches: The rows of each micro-batch of each minibatch.
        is_late: True for rollouts of an earlier version of the policy.
        has_one_update: True if the step has one update in all.
    """
    if is_late and not old_policy.is_proximal:
        return torch.zeros(0) if rollouts.sampler_logp is None else rollouts.sampler_logp, 0

    # If π_old is the policy as it is now, the forward of the first update computes log π_old of its minibatch.
    num_missing = int(old_policy.is_policy)
    if has_one_update and num_missing and not is_read_before_updates:
        return None, 1
    minibatches = rows_of_micro_batches[0 if is_read_before_updates else num_missing :]
    micro_batches = [rows for minibatch in minibatches for rows in minibatch]

    # An advantage also reads the rows that no update learns from.
    if is_read_before_updates:
        is_unused = torch.ones(len(rollouts), dtype=torch.bool)
        is_unused[torch.cat([torch.empty(0, dtype=torch.int64), *micro_batches])] = False
        unused_rows = is_unused.nonzero().squeeze(1)
        if len(unused_rows):
            further_rows = micro_batcher.rows_of_micro_batches(rollouts.select(unused_rows))
            micro_batches += [unused_rows[rows] for rows in further_rows]

    with torch.no_grad():
        logp = micro_batcher.per_token(
            rollouts, micro_batches, lambda micro_batch: old_policy(micro_batcher.policy, micro_batch)
        )
    return logp, num_missing
