"""The groups of a step that may be recorded: measured before its updates, and again after them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.step import Step
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.ragged import take
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.looking.inspector.groups import (
    Measure,
    Row,
    completion_record,
    group_record,
    mean_and_std,
    measured,
)
from grpo_lightning.plugins.looking.inspector.landscape import curves
from grpo_lightning.plugins.looking.inspector.record import CompletionRecord, GroupRecord, TokenRecord
from grpo_lightning.policy.compute import TokenLogp
from grpo_lightning.training.module import GRPOModule

MIXED = "mixed"
MOVED = "moved"
WORST = "worst"
BEST = "best"
ROLES = (MIXED, MOVED, WORST, BEST)
"""The reasons for which groups are recorded, in turn."""


@dataclass(slots=True, frozen=True)
class GroupSummary:
    """The numbers by which groups are chosen."""

    prompt_id: int
    """The prompt's id in its step."""
    mean: float
    """Mean reward; NaN if every completion's reward failed."""
    std: float
    """Population standard deviation of the rewards."""
    push: float
    """Sum over the tokens of |weight * Â| (1 - p), p the probability that the token was sampled with."""


@dataclass(slots=True)
class Choice:
    """The groups of all ranks that may be recorded, known before the step's updates."""

    role_by_id: dict[int, str]
    """The role of each group that will be recorded whatever it moves, by prompt id."""
    pushed_ids: list[int]
    """The prompt ids of the other groups that were pushed hardest: `num_moved` of them will be recorded."""
    num_moved: int
    """Groups that will be recorded because they moved most."""
    leader_by_role: dict[str, int]
    """By role, the prompt id of the group that comes first in it."""

    @classmethod
    def from_groups(cls, groups: Sequence[GroupSummary], num_groups: int) -> "Choice":
        """Chooses `num_groups` among the groups of all ranks; of equal groups the lower prompt id comes first."""
        groups = sorted(groups, key=lambda group: group.prompt_id)
        rewarded = [group for group in groups if not math.isnan(group.mean)]
        rankings = {
            MIXED: sorted((group for group in rewarded if group.std > 0), key=lambda group: -group.std),
            WORST: sorted(rewarded, key=lambda group: group.mean),
            BEST: sorted(rewarded, key=lambda group: -group.mean),
        }

        # The roles take a group in turn, none twice. How far groups move is not known yet.
        role_by_id: dict[int, str] = {}
        for turn in range(num_groups):
            role = ROLES[turn % len(ROLES)]
            unused_ids = [group.prompt_id for group in rankings.get(role, []) if group.prompt_id not in role_by_id]
            if unused_ids:
                role_by_id[unused_ids[0]] = role

        # Turns without a group go to those that move most. Twice as many are measured, those pushed hardest.
        num_moved = num_groups - len(role_by_id)
        unused = [group for group in groups if group.prompt_id not in role_by_id]
        pushed = sorted(unused, key=lambda group: -group.push)[: 2 * num_moved]
        leader_by_role = {role: ranking[0].prompt_id for role, ranking in rankings.items() if ranking}
        return cls(role_by_id, [group.prompt_id for group in pushed], num_moved, leader_by_role)

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt ids of all groups that may be recorded."""
        return [*self.role_by_id, *self.pushed_ids]

    def roles(self, movement: Mapping[int, float]) -> dict[int, list[str]]:
        """Returns the roles of each group that is recorded, by prompt id, in the order of `ROLES`.

        Args:
            movement: Mean |Δ log p| of each group that may be recorded, by prompt id.
        """
        by_movement = sorted(self.prompt_ids, key=lambda id: (-movement[id], id))
        moved_ids = [id for id in by_movement if id in self.pushed_ids][: self.num_moved]
        roles = {id: [role] for id, role in self.role_by_id.items()} | {id: [MOVED] for id in moved_ids}

        # A group that comes first for several reasons has several roles.
        leader_by_role = dict(self.leader_by_role)
        if by_movement and movement[by_movement[0]] > 0:
            leader_by_role[MOVED] = by_movement[0]
        for role, id in leader_by_role.items():
            if id in roles and role not in roles[id]:
                roles[id].append(role)
        return dict(sorted(roles.items(), key=lambda item: ROLES.index(item[1][0])))


def summarise(exploration: Exploration) -> list[GroupSummary]:
    """Summarises the groups of this rank that are learned from, once they have advantages and weights."""
    rollouts = exploration.rollouts
    total = exploration.scores.total
    push = (rollouts.weight * rollouts.advantage).abs().double()
    if rollouts.sampler_logp is not None:
        push *= -rollouts.sampler_logp.double().expm1()  # 1 - p
    push_by_row = [float(values.sum()) for values in push.split(rollouts.lengths.tolist())]

    # Pieces of a conversation are rows of one sample: each pushes, the reward counts once.
    samples = rollouts.sample_index.tolist()
    begins = rollouts.is_first_row.tolist()
    numbers_by_id: dict[int, tuple[list[float], list[float]]] = {}
    for sample, is_new, row_push, prompt_id in zip(samples, begins, push_by_row, exploration.prompt_ids, strict=True):
        rewards, pushes = numbers_by_id.setdefault(prompt_id, ([], []))
        pushes.append(row_push)
        if is_new and not math.isnan(total[sample]):
            rewards.append(total[sample])
    return [GroupSummary(id, *mean_and_std(rewards), sum(pushes)) for id, (rewards, pushes) in numbers_by_id.items()]


@dataclass(slots=True)
class Learned:
    """One row of the rollouts in the forward of the last update that saw it."""

    update: int
    """Index of the update in its step."""
    rollouts: Rollouts
    """The row, with what the update read."""
    numbers: dict[str, Any]
    """Fields of a `TokenRecord`: [n] over its sampled tokens, or None."""


def learned_from(
    step: Step, samples: Collection[int], objective: Objective, num_minibatches: int
) -> dict[int, list[Learned]]:
    """Returns the rows of some samples as the step's updates saw them, by the index of the sample."""
    learned: dict[int, list[Learned]] = {sample: [] for sample in samples}
    last_update = len(step.passes.updates) - 1
    for minibatch, micro_batches in enumerate(step.micro_batches):
        # Every pass takes the minibatches in the same order.
        update = last_update - (last_update - minibatch) % num_minibatches
        for micro_batch in micro_batches:
            scored = micro_batch.scored
            if scored is None:
                continue
            # Copied from the device at once, not row by row.
            rollouts = micro_batch.rollouts.to("cpu")
            values = (scored.logp, scored.entropy, scored.read)
            values_on_cpu = [value if value is None else value.cpu() for value in values]
            for index, sample in enumerate(rollouts.sample_index.tolist()):
                if sample in learned:
                    learned[sample].append(Learned(update, *_numbers(rollouts, values_on_cpu, index, objective)))
    return learned


def _numbers(
    rollouts: Rollouts, values: list[Any], index: int, objective: Objective
) -> tuple[Rollouts, dict[str, Any]]:
    """Returns one row of a micro-batch, and the numbers of its tokens in the update.

    Args:
        rollouts: The micro-batch, on the CPU.
        values: [N] log-probs, [N] entropies and what was read of all tokens of the micro-batch.
        index: Index of the row.
        objective: The objective of the run.
    """
    row = torch.tensor([index])
    rollout = rollouts.select(row)
    tokens = take(row, rollouts.lengths)
    logp, entropy, divergence = (value if value is None else value[tokens] for value in values)
    assert logp is not None and entropy is not None
    with torch.enable_grad():
        leaf = logp.clone().requires_grad_()
        # A divergence of whole distributions has no gradient by the sampled token's log-prob alone: it is in no push.
        terms = objective.terms(leaf, entropy, rollout, divergence)
        old_logp = logp if rollout.old_logp is None else rollout.old_logp
        factor = objective.factor(old_logp, rollout)
        weight = rollout.weight * factor
        (push,) = torch.autograd.grad((weight * terms.total).sum(), leaf)
    clip = terms.surrogate.clipped_high.to(torch.int8) - terms.surrogate.clipped_low.to(torch.int8)
    return rollout, {
        "old_logp": rollout.old_logp,
        "update_logp": logp,
        "ref_logp": rollout.ref_logp,
        "surrogate": terms.surrogate.value.detach(),
        "kl": None if rollout.ref_logp is None and divergence is None else terms.kl.detach(),
        "correction": factor if objective.correction.reads_sampler else None,
        "push": push,
        "clip": torch.where((weight != 0) & (rollout.advantage != 0), clip, 0),
        "entropy_update": entropy,
    }


class Candidates:
    """The groups of this rank that may be recorded. Make it before the step's updates, on every rank.

    Args:
        step: The exploration step.
        module: The module that learns from it.
        num_groups: Groups that will be recorded, over all ranks.
        measure: Measures rollouts with the policy.
    """

    def __init__(self, step: Step, module: GRPOModule, num_groups: int, measure: Measure) -> None:
        self.step = step
        self.module = module
        self.measure = measure
        exploration = step.exploration
        summaries = [summary for rank in ranks.gather(summarise(exploration)) for summary in rank]
        self.choice = Choice.from_groups(summaries, num_groups)
        rows = [row for row, id in enumerate(exploration.prompt_ids) if id in self.choice.prompt_ids]
        self.prompt_ids = [exploration.prompt_ids[row] for row in rows]
        self.rollouts = exploration.rollouts.select(torch.tensor(rows, dtype=torch.int64))
        self.scored_before = measure(self.rollouts)

        # log π_old: of fresh rollouts it is what was just measured, of stale ones what the engine recorded.
        is_fresh = exploration.policy_version == module.policy.version or module.old_policy.is_proximal
        self.old_logp = self.rollouts.sampler_logp
        if is_fresh:
            self.old_logp = self.scored_before.logp if module.old_policy.is_policy else None

    def records(self, num_minibatches: int) -> list[GroupRecord]:
        """Returns the groups of all ranks that are recorded. Call it after the step's updates, on every rank."""
        scored_after = self.measure(self.rollouts)
        roles = self.choice.roles(self._movement(scored_after))
        rows: dict[int, list[Row]] = {}
        for id, row in zip(self.prompt_ids, Row.all_of(self.rollouts), strict=True):
            if id in roles:
                rows.setdefault(id, []).append(row)
        samples = {int(row.rollouts.sample_index) for group in rows.values() for row in group}
        learned = learned_from(self.step, samples, self.module.objective, num_minibatches)
        groups = {id: self._group(roles[id], group, learned, scored_after) for id, group in rows.items()}
        record_by_id = {id: record for rank in ranks.gather(groups) for id, record in rank.items()}
        return [record_by_id[id] for id in roles]

    def _movement(self, scored_after: TokenLogp) -> dict[int, float]:
        """Returns mean |Δ log p| of each group of all ranks, by prompt id."""
        changes: dict[int, list[float]] = {}
        change = (scored_after.logp - self.scored_before.logp).abs().double()
        for id, values in zip(self.prompt_ids, change.split(self.rollouts.lengths.tolist()), strict=True):
            changes.setdefault(id, []).extend(values.tolist())
        means = {id: sum(values) / len(values) for id, values in changes.items()}
        return {id: mean for rank in ranks.gather(means) for id, mean in rank.items()}

    def _group(
        self, roles: list[str], rows: list[Row], learned: dict[int, list[Learned]], scored_after: TokenLogp
    ) -> GroupRecord:
        exploration = self.step.exploration
        tokenizer = self.module.policy.tokenizer
        completions: list[CompletionRecord] = []
        updates: list[int] = []
        for row in rows:
            sample = int(row.rollouts.sample_index)
            # The tokens tell the pieces of one conversation apart.
            same_tokens = (entry for entry in learned[sample] if next(Row.all_of(entry.rollouts)).ids == row.ids)
            entry = next(same_tokens, None)
            if entry is not None:
                updates.append(entry.update)
            tokens = self._tokens(row, entry, scored_after)
            completions.append(completion_record(exploration.samples[sample], exploration.scores, sample, row, tokens))
        prompt = rows[0].prompt(exploration.samples[int(rows[0].rollouts.sample_index)], tokenizer)
        return group_record("train", roles, prompt, max(updates, default=None), completions, tokenizer)

    def _tokens(self, row: Row, learned: Learned | None, scored_after: TokenLogp) -> TokenRecord:
        """Returns the record of the tokens of one row."""
        rollouts = row.rollouts
        objective = self.module.objective
        after_logp = scored_after.logp[row.tokens]
        numbers: dict[str, Any] = {
            "sampler_logp": rollouts.sampler_logp,
            "old_logp": None if self.old_logp is None else self.old_logp[row.tokens],
            "after_logp": after_logp,
            "advantage": rollouts.advantage,
            "weight": rollouts.weight,
        }
        numbers |= measured(self.scored_before, row.tokens, "before") | measured(scored_after, row.tokens, "after")
        learns_from_all = not objective.learns_from_advantage_alone or objective.reward_kl is not None
        if learned is not None:
            numbers |= learned.numbers
            numbers |= curves(objective, learned.rollouts, numbers["update_logp"], numbers["push"], after_logp)
            if numbers["correction"] is not None:
                numbers["weight"] = rollouts.weight * numbers["correction"]
        elif not learns_from_all and not bool((rollouts.weight * rollouts.advantage).any()):
            # No update took it in, since it adds nothing.
            zeros = torch.zeros_like(rollouts.weight)
            numbers |= {"surrogate": zeros, "push": zeros, "clip": zeros.to(torch.int8)}
        return row.record(self.module.policy.tokenizer, **numbers)
