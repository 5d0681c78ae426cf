"""Line 9 of Algorithm 1, and what the updates of line 11 need: token weights, micro-batches, and log-probs.

The micro-batches are cut first, and log π_old is computed on the very micro-batches that the updates use. In bfloat16 a
log-prob depends on what else is in its micro-batch, and the ratio must be 1 while nothing has been learned.

Rollouts stay on the CPU, and micro-batches are on the device of the policy. All ranks make the same number of forwards.
"""

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.engines.recorded import check_recorded
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.step import MicroBatch, Parts
from grpo_lightning.maths.filters import ENTROPY_RANK
from grpo_lightning.maths.minibatches import minibatch_of_rows, rows_with_gradient
from grpo_lightning.maths.ragged import take
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.weightings import BatchSize
from grpo_lightning.policy.old_logp import old_policy_logp
from grpo_lightning.policy.packer import Packer, Rows


def prepare(
    parts: Parts, exploration: Exploration, num_minibatches: int, mu: int, max_tokens: int
) -> tuple[Rollouts, list[list[MicroBatch]]]:
    """Computes every column that the updates read, and cuts each minibatch into micro-batches.

    Every rank must call it. Rows without a gradient are left out, if the advantage alone tells which these are.

    Args:
        parts: The policy, the objective and the other parts of the run.
        exploration: The completions of the step and their rewards.
        num_minibatches: Optimizer updates per pass.
        mu: Passes over the rollouts.
        max_tokens: Tokens per micro-batch; 0 sets no limit.

    Returns:
        The rollouts with all columns, and the micro-batches of each minibatch.
    """
    objective = parts.objective
    rollouts = exploration.rollouts
    # Late rollouts were sampled from an earlier policy than the one that learns now.
    is_late = exploration.policy_version != parts.policy.version
    check_recorded(rollouts, is_late, parts.old_policy, objective.correction, parts.sampling)
    packer = Packer(parts.policy, max_tokens, rollouts.temperature)

    # Columns that need no log-probs: entropy ranks, usually Â, and columns of the masks, which may read the other two.
    advantage_reads_logp = objective.reward_kl is not None or bool(parts.advantage.reads)
    if any(mask.reads_entropy for mask in objective.masks):
        rollouts = rollouts.with_columns({ENTROPY_RANK: packer.entropy_rank(rollouts)})
    if not advantage_reads_logp:
        rollouts = rollouts.with_columns({"advantage": advantages(parts, rollouts, exploration.rewards)})
    for mask in objective.masks:
        rollouts = rollouts.with_columns(mask.prepare(rollouts))

    # The weight of each token, and the rows of each micro-batch. Rows without Â are dropped if nothing else moves them.
    drops_rows = objective.learns_from_advantage_alone and not advantage_reads_logp
    minibatch_of_row = minibatch_of_rows(exploration.prompt_ids, num_minibatches)
    weight, rows_of_micro_batches = cut_minibatches(
        parts, rollouts, packer, minibatch_of_row, num_minibatches, drops_rows
    )

    # log π_old: recorded by the sampler, computed here, or left to the first update, whose forward has it anyway.
    objective_reads_logp = objective.surrogate.reads_old_logp or objective.correction.reads_old_logp
    needed_first = advantage_reads_logp or objective_reads_logp
    one_update = num_minibatches == mu == 1
    old_logp, num_without_old_logp = old_policy_logp(
        parts.old_policy, needed_first, rollouts, packer, rows_of_micro_batches, is_late, one_update
    )
    rollouts = rollouts.with_columns({"weight": weight, "old_logp": old_logp})

    # log π_ref, where something reads it per token. Updates compute whole distributions of π_ref by themselves.
    if (reference := parts.reference) is not None:
        reference.begin(parts.policy, exploration.samples)
        if advantage_reads_logp or not objective.kl.reads_distributions:
            all_micro_batches = [rows for minibatch in rows_of_micro_batches for rows in minibatch]
            ref_logp = packer.per_token(
                rollouts, all_micro_batches, lambda micro_batch: reference(parts.policy, micro_batch)
            )
            rollouts = rollouts.with_columns({"ref_logp": ref_logp})

    # Columns that need log-probs: sometimes Â, and columns of the surrogate and of the correction.
    if advantage_reads_logp:
        rollouts = rollouts.with_columns({"advantage": advantages(parts, rollouts, exploration.rewards)})
    rollouts = rollouts.with_columns(objective.prepare(rollouts))
    return rollouts, micro_batches_on_device(rollouts, packer, rows_of_micro_batches, num_without_old_logp)


def advantages(parts: Parts, rollouts: Rollouts, rewards: RewardBatch) -> Tensor:
    """[N] float32 Â of every token (line 9), from rewards that include the KL penalty where there is one."""
    rewards.columns = {name: rollouts.columns[name] for name in parts.advantage.reads}
    if (penalty := parts.objective.reward_kl) is not None:
        rewards = penalty(rewards, rollouts)

    # An estimator may normalise over the whole step: each rank computes Â of all ranks, and takes Â of its tokens.
    rewards_of_ranks = ranks.gather(rewards)
    tokens_of_ranks = [int(rank_rewards.lengths.sum()) for rank_rewards in rewards_of_ranks]
    advantage = parts.advantage.per_token(RewardBatch.concat(rewards_of_ranks))
    return advantage.split(tokens_of_ranks)[ranks.rank()]


def cut_minibatches(
    parts: Parts,
    rollouts: Rollouts,
    packer: Packer,
    minibatch_of_row: Tensor,
    num_minibatches: int,
    drops_rows: bool,
) -> tuple[Tensor, list[list[Rows]]]:
    """Computes the weight of every token, and cuts each minibatch into micro-batches.

    Args:
        parts: The parts of the run; the objective makes the weights.
        rollouts: The rollouts of the step, with the columns of the masks.
        packer: Cuts rows into micro-batches.
        minibatch_of_row: [B] int64, the minibatch of each row.
        num_minibatches: Optimizer updates per pass.
        drops_rows: Leave out rows that have no gradient. They still count in the weights of the other rows.

    Returns:
        [N] token weights, and the rows of each micro-batch of each minibatch.
    """
    objective = parts.objective
    weight = torch.zeros_like(rollouts.weight)
    rows_of_micro_batches: list[list[Rows]] = []
    for index in range(num_minibatches):
        rows = (minibatch_of_row == index).nonzero().squeeze(1)
        minibatch = rollouts.select(rows)

        # A weight is a fraction of the minibatch of all ranks: it must not depend on the micro-batches.
        longest = parts.explorer.sampler.longest(parts.sampling)
        batch_size = BatchSize.of_all_ranks(minibatch, objective.counted(minibatch), longest)
        if len(minibatch):
            minibatch = minibatch.with_columns({"weight": objective.token_weight(minibatch, batch_size)})
            weight[take(rows, rollouts.lengths)] = minibatch.weight

        if drops_rows:
            with_gradient = rows_with_gradient(minibatch)
            rows = rows[with_gradient]
            minibatch = minibatch.select(with_gradient)
        rows_of_micro_batches.append([rows[micro_batch] for micro_batch in packer.rows_of_micro_batches(minibatch)])
    return weight, rows_of_micro_batches


def micro_batches_on_device(
    rollouts: Rollouts, packer: Packer, rows_of_micro_batches: list[list[Rows]], num_without_old_logp: int
) -> list[list[MicroBatch]]:
    """Makes the micro-batches of each minibatch, the same number on every rank.

    The first `num_without_old_logp` minibatches lack log π_old: their first update computes it.
    """
    # Idle micro-batches fill up a rank that has fewer. They need every column that any rank has.
    column_names = {name for names in ranks.gather({*rollouts.columns}) for name in names}
    device = packer.policy.device
    zero = torch.zeros(1, dtype=torch.float32, device=device)
    idle_micro_batch = packer.idle.with_columns(dict.fromkeys(column_names, zero))

    micro_batches: list[list[MicroBatch]] = []
    for index, rows_of_minibatch in enumerate(rows_of_micro_batches):
        selected = [rollouts.select(rows).to(device) for rows in rows_of_minibatch]
        if index < num_without_old_logp:
            selected = [micro_batch.with_columns({"old_logp": None}) for micro_batch in selected]
        num_idle = max(1, *ranks.gather(len(selected))) - len(selected)
        micro_batches.append([MicroBatch(micro_batch) for micro_batch in [*selected, *[idle_micro_batch] * num_idle]])
    return micro_batches
