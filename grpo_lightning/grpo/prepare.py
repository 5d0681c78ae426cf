"""Line 9 and what the updates need: weights, packs, log-probs and advantages of a step's rollouts.

The packs of the updates are cut first, and log π_old is computed on those very packs. In bfloat16 a log-prob depends on
what else is in its pack, and a ratio should be 1 while nothing has been learned. Rollouts stay on the CPU; packs go to
the device. Every rank makes as many forwards as the others.
"""

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.engines.recorded import check_recorded
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.step import Pack, Parts
from grpo_lightning.maths.filters import ENTROPY_RANK
from grpo_lightning.maths.packs import minibatch_of_rows, moving_rows
from grpo_lightning.maths.ragged import take
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.weightings import BatchSize
from grpo_lightning.policy.old_logp import old_policy_logp
from grpo_lightning.policy.packer import Packer, Rows


def prepare(
    parts: Parts, exploration: Exploration, num_minibatches: int, mu: int, max_tokens: int
) -> tuple[Rollouts, list[list[Pack]]]:
    """The rollouts with all columns that the updates read, and the packs of each minibatch on the policy's device."""
    rollouts, policy, objective = exploration.rollouts, parts.policy, parts.objective
    is_late = exploration.policy_version != policy.version
    check_recorded(rollouts, is_late, parts.old_policy, objective.correction, parts.sampling)
    packer = Packer(policy, max_tokens, rollouts.temperature)
    if any(mask.reads_entropy for mask in objective.masks):
        rollouts = rollouts.with_columns({ENTROPY_RANK: packer.entropy_rank(rollouts)})
    logp_first = objective.reward_kl is not None or bool(parts.advantage.reads)  # Â needs log-probs
    if not logp_first:
        rollouts = rollouts.with_columns({"advantage": advantages(parts, rollouts, exploration.rewards)})
    for mask in objective.masks:
        rollouts = rollouts.with_columns(mask.prepare(rollouts))
    minibatch = minibatch_of_rows(exploration.prompt_ids, num_minibatches)
    drops_rows = objective.learns_from_advantage_alone and not logp_first
    weight, cut = cut_minibatches(parts, rollouts, packer, minibatch, num_minibatches, drops_rows)
    first = logp_first or objective.surrogate.reads_old_logp or objective.correction.reads_old_logp
    one_update = num_minibatches == mu == 1
    old_logp, unknown = old_policy_logp(parts.old_policy, first, rollouts, packer, cut, is_late, one_update)
    rollouts = rollouts.with_columns({"weight": weight, "old_logp": old_logp})
    if (reference := parts.reference) is not None:
        reference.begin(policy, exploration.samples)
    if reference is not None and (logp_first or not objective.kl.reads_distributions):
        every = [rows for packs in cut for rows in packs]
        ref_logp = packer.per_token(rollouts, every, lambda pack: reference(policy, pack))
        rollouts = rollouts.with_columns({"ref_logp": ref_logp})
    if logp_first:
        rollouts = rollouts.with_columns({"advantage": advantages(parts, rollouts, exploration.rewards)})
    rollouts = rollouts.with_columns(objective.prepare(rollouts))
    # An idle pack needs every column that any rank has.
    names = {name for own in ranks.gather({*rollouts.columns}) for name in own}
    idle = packer.idle.with_columns(dict.fromkeys(names, torch.zeros(1, dtype=torch.float32, device=policy.device)))
    packs = []
    for index, minibatch_rows in enumerate(cut):
        chosen = [rollouts.select(rows).to(policy.device) for rows in minibatch_rows]
        if index < unknown:
            chosen = [pack.with_columns({"old_logp": None}) for pack in chosen]
        num_idle = max(1, *ranks.gather(len(chosen))) - len(chosen)
        packs.append([Pack(pack) for pack in [*chosen, *[idle] * num_idle]])
    return rollouts, packs


def advantages(parts: Parts, rollouts: Rollouts, rewards: RewardBatch) -> Tensor:
    """[N] line 9: Â of every token, from the rewards of all ranks, with a KL penalty if there is one."""
    rewards.columns = {name: rollouts.columns[name] for name in parts.advantage.reads}
    if (penalty := parts.objective.reward_kl) is not None:
        rewards = penalty(rewards, rollouts)
    everyone = ranks.gather(rewards)
    tokens = [int(batch.lengths.sum()) for batch in everyone]
    return parts.advantage.per_token(RewardBatch.concat(everyone)).split(tokens)[ranks.rank()]


def cut_minibatches(
    parts: Parts, rollouts: Rollouts, packer: Packer, minibatch: Tensor, count: int, drops_rows: bool
) -> tuple[Tensor, list[list[Rows]]]:
    """[N] the weight of every token, and the rows of each pack of each minibatch, some without those that move none."""
    objective, weight = parts.objective, torch.zeros_like(rollouts.weight)
    cut: list[list[Rows]] = []
    for index in range(count):
        rows = (minibatch == index).nonzero().squeeze(1)
        part = rollouts.select(rows)
        longest = parts.explorer.sampler.longest(parts.sampling)
        batch = BatchSize.of_all_ranks(part, objective.counted(part), longest)
        if len(part):
            part = part.with_columns({"weight": objective.token_weight(part, batch)})
            weight[take(rows, rollouts.lengths)] = part.weight
        if drops_rows:
            moving = moving_rows(part)
            rows, part = rows[moving], part.select(moving)
        cut.append([rows[pack] for pack in packer.rows_of_packs(part)])
    return weight, cut
