"""Line 9 of Algorithm 1, and what the updates of line 11 need: token weights, micro-batches, and log-probs.

The micro-batches are cut first, so that log π_old is computed on the same micro-batches as in the updates: in bfloat16
a log-prob depends on the other rows of its micro-batch, and the ratio must be 1 before the first update.

Rollouts stay on the CPU, and micro-batches are on the device of the policy. All ranks make the same number of forwards.
Columns are [N] float32 numbers of the sampled tokens by name, such as Â and log π_old.
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
from grpo_lightning.policy.micro_batcher import MicroBatcher, Rows
from grpo_lightning.policy.old_logp import old_policy_logp


def prepare(
    parts: Parts, exploration: Exploration, num_minibatches: int, mu: int, max_tokens: int
) -> tuple[Rollouts, list[list[MicroBatch]]]:
    """Computes every column that the updates read, and cuts each minibatch into micro-batches.

    Micro-batches leave out rows that cannot have a gradient, where Â alone decides this. Every rank must call it.

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
    # Late rollouts were sampled from an earlier policy. What the options read of them must have been recorded.
    is_late = exploration.policy_version != parts.policy.version
    check_recorded(rollouts, is_late, parts.old_policy, objective.correction, parts.sampling)
    # Cuts rows into micro-batches, and computes columns by forwards of these.
    micro_batcher = MicroBatcher(parts.policy, max_tokens, rollouts.temperature)

    # Columns that need no log-probs, in the order in which they are read: the rank of each token by entropy, Â (which
    # needs log-probs only with a KL penalty in the reward, for example), and the columns that masks compute from both.
    advantage_reads_logp = objective.reward_kl is not None or bool(parts.advantage.reads)
    if any(mask.reads_entropy for mask in objective.masks):
        rollouts = rollouts.with_columns({ENTROPY_RANK: micro_batcher.entropy_rank(rollouts)})
    if not advantage_reads_logp:
        rollouts = rollouts.with_columns({"advantage": advantages(parts, rollouts, exploration.rewards)})
    for mask in objective.masks:
        rollouts = rollouts.with_columns(mask.prepare(rollouts))

    # The weight of each token, and the rows of each micro-batch. Where only Â gives a gradient, rows without Â are
    # left out.
    drops_rows = objective.learns_from_advantage_alone and not advantage_reads_logp
    minibatch_of_row = minibatch_of_rows(exploration.prompt_ids, num_minibatches)
    weight, rows_of_micro_batches = cut_minibatches(
        parts, rollouts, micro_batcher, minibatch_of_row, num_minibatches, drops_rows
    )

    # log π_old: recorded by the sampler, computed here, or left to the first update, whose forward computes it anyway.
    objective_reads_logp = objective.surrogate.reads_old_logp or objective.correction.reads_old_logp
    is_read_before_updates = advantage_reads_logp or objective_reads_logp
    has_one_update = num_minibatches == mu == 1
    old_logp, num_without_old_logp = old_policy_logp(
        parts.old_policy,
        is_read_before_updates,
        rollouts,
        micro_batcher,
        rows_of_micro_batches,
        is_late,
        has_one_update,
    )
    rollouts = rollouts.with_columns({"weight": weight, "old_logp": old_logp})

    # log π_ref, unless the KL term compares whole distributions: then each update computes those of π_ref itself.
    if (reference := parts.reference) is not None:
        # Some references read the samples' texts: a teacher who sees a solution, for example.
        reference.begin(parts.policy, exploration.samples)
        if advantage_reads_logp or not objective.kl.reads_distributions:
            all_micro_batches = [rows for minibatch in rows_of_micro_batches for rows in minibatch]
            ref_logp = micro_batcher.per_token(
                rollouts, all_micro_batches, lambda micro_batch: reference(parts.policy, micro_batch)
            )
            rollouts = rollouts.with_columns({"ref_logp": ref_logp})

    # Columns that need log-probs: Â if it was not computed above, and the columns of surrogate and correction.
    if advantage_reads_logp:
        rollouts = rollouts.with_columns({"advantage": advantages(parts, rollouts, exploration.rewards)})
    rollouts = rollouts.with_columns(objective.prepare(rollouts))
    return rollouts, micro_batches_on_device(rollouts, micro_batcher, rows_of_micro_batches, num_without_old_logp)


def advantages(parts: Parts, rollouts: Rollouts, rewards: RewardBatch) -> Tensor:
    """[N] float32 Â of every token (line 9). A KL penalty in the reward is subtracted from `rewards` first."""
    rewards.columns = {name: rollouts.columns[name] for name in parts.advantage.reads}
    if (penalty := parts.objective.reward_kl) is not None:
        rewards = penalty(rewards, rollouts)

    # An estimator may normalise over the whole step: each rank computes Â of all ranks, and returns its own part.
    rewards_of_ranks = ranks.gather(rewards)
    tokens_of_ranks = [int(rank_rewards.lengths.sum()) for rank_rewards in rewards_of_ranks]
    advantage = parts.advantage.per_token(RewardBatch.concat(rewards_of_ranks))
    return advantage.split(tokens_of_ranks)[ranks.rank()]


def cut_minibatches(
    parts: Parts,
    rollouts: Rollouts,
    micro_batcher: MicroBatcher,
    minibatch_of_row: Tensor,
    num_minibatches: int,
    drops_rows: bool,
) -> tuple[Tensor, list[list[Rows]]]:
    """Computes the weight of every token, and cuts each minibatch into micro-batches.

    Args:
        parts: The parts of the run. The objective computes the weights.
        rollouts: The rollouts of the step, with the columns of the masks.
        micro_batcher: Cuts rows into micro-batches.
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

        # A weight is a fraction of the minibatch of all ranks, so it does not depend on the cut into micro-batches.
        # `longest` is the longest completion that the run allows: some weightings divide by it.
        longest = parts.explorer.sampler.longest(parts.sampling)
        batch_size = BatchSize.of_all_ranks(minibatch, objective.counted(minibatch), longest)
        if len(minibatch):
            minibatch = minibatch.with_columns({"weight": objective.token_weight(minibatch, batch_size)})
            weight[take(rows, rollouts.lengths)] = minibatch.weight

        if drops_rows:
            with_gradient = rows_with_gradient(minibatch)
            rows = rows[with_gradient]
            minibatch = minibatch.select(with_gradient)
        rows_of_micro_batches.append(
            [rows[micro_batch] for micro_batch in micro_batcher.rows_of_micro_batches(minibatch)]
        )
    return weight, rows_of_micro_batches


def micro_batches_on_device(
    rollouts: Rollouts, micro_batcher: MicroBatcher, rows_of_micro_batches: list[list[Rows]], num_without_old_logp: int
) -> list[list[MicroBatch]]:
    """Makes the micro-batches of each minibatch, the same number on every rank.

    The first `num_without_old_logp` minibatches, 0 or 1, lack log π_old: their first update computes it.
    """
    # A rank with fewer micro-batches gets idle ones, of weight 0. They need every column that any rank has.
    column_names = {name for names in ranks.gather({*rollouts.columns}) for name in names}
    device = micro_batcher.policy.device
    zero = torch.zeros(1, dtype=torch.float32, device=device)
    idle_micro_batch = micro_batcher.idle.with_columns(dict.fromkeys(column_names, zero))

    micro_batches: list[list[MicroBatch]] = []
    for index, rows_of_minibatch in enumerate(rows_of_micro_batches):
        selected = [rollouts.select(rows).to(device) for rows in rows_of_minibatch]
        if index < num_without_old_logp:
            selected = [micro_batch.with_columns({"old_logp": None}) for micro_batch in selected]
        num_idle = max(1, *ranks.gather(len(selected))) - len(selected)
        micro_batches.append([MicroBatch(micro_batch) for micro_batch in [*selected, *[idle_micro_batch] * num_idle]])
    return micro_batches
