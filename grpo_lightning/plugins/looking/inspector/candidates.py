"""The groups of a step that may be recorded: measured before its updates, and again after them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
from grpo_lightning.plugins.looking.inspector.record import GroupRecord, TokenRecord
from grpo_lightning.policy.compute import TokenLogp
from grpo_lightning.training.module import GRPOModule

MIXED, MOVED, WORST, BEST = ROLES = ("mixed", "moved", "worst", "best")
"""The reasons for which groups are recorded, in turn."""


@dataclass(slots=True, frozen=True)
class GroupSummary:
    """What decides whether a group is recorded."""

    prompt_id: int
    mean: float  # mean reward; NaN if every completion's reward failed
    std: float
    push: float  # sum over the tokens of |weight * Â| (1 - p), p the probability that the token was drawn with


@dataclass(slots=True)
class Choice:
    """The groups of all ranks that may be recorded, known before the step's updates."""

    taken: dict[int, str]
    pushed: list[int]  # the prompt ids of those pushed hardest among the others: `num_moved` of them will be recorded
    num_moved: int
    firsts: dict[str, int]  # by role, the prompt id of the group that has most of it

    @classmethod
    def from_groups(cls, groups: Sequence[GroupSummary], num_groups: int) -> "Choice":
        """The choice of `num_groups` among the groups of all ranks; of equal ones the lower prompt id comes first."""
        groups = sorted(groups, key=lambda group: group.prompt_id)
        rewarded = [group for group in groups if not math.isnan(group.mean)]
        rankings = {
            MIXED: sorted((group for group in rewarded if group.std > 0), key=lambda group: -group.std),
            WORST: sorted(rewarded, key=lambda group: group.mean),
            BEST: sorted(rewarded, key=lambda group: -group.mean),
        }
        taken: dict[int, str] = {}
        for turn in range(num_groups):
            role = ROLES[turn % len(ROLES)]
            left = [group.prompt_id for group in rankings.get(role, []) if group.prompt_id not in taken]
            taken |= {left[0]: role} if left else {}
        others = sorted((group for group in groups if group.prompt_id not in taken), key=lambda group: -group.push)
        num_moved = num_groups - len(taken)
        firsts = {role: ranking[0].prompt_id for role, ranking in rankings.items() if ranking}
        return cls(taken, [group.prompt_id for group in others[: 2 * num_moved]], num_moved, firsts)

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt ids of all groups that may be recorded."""
        return [*self.taken, *self.pushed]

    def roles(self, movement: Mapping[int, float]) -> dict[int, list[str]]:
        """The roles of each group that is recorded, by prompt id, in the order of `ROLES`."""
        by_movement = sorted(self.prompt_ids, key=lambda id: (-movement[id], id))
        moved = [id for id in by_movement if id in self.pushed][: self.num_moved]
        found = {id: [role] for id, role in self.taken.items()} | {id: [MOVED] for id in moved}
        most = {MOVED: by_movement[0]} if by_movement and movement[by_movement[0]] > 0 else {}
        for role, id in (self.firsts | most).items():
            if id in found and role not in found[id]:
                found[id].append(role)
        return dict(sorted(found.items(), key=lambda item: ROLES.index(item[1][0])))


def summarise(exploration: Exploration) -> list[GroupSummary]:
    """The groups of this rank that are learned from. Their advantages and weights must be there."""
    rollouts, total = exploration.rollouts, exploration.scores.total
    push = (rollouts.weight * rollouts.advantage).abs().double()
    if rollouts.sampler_logp is not None:
        push *= -rollouts.sampler_logp.double().expm1()
    per_row = [float(part.sum()) for part in push.split(rollouts.lengths.tolist())]
    found: dict[int, tuple[list[float], list[float]]] = {}
    rows, begins = rollouts.row.tolist(), rollouts.is_first_row.tolist()
    for row, is_new, pushed, prompt_id in zip(rows, begins, per_row, exploration.prompt_ids, strict=True):
        rewards, pushes = found.setdefault(prompt_id, ([], []))
        rewards += [total[row]] if is_new and not math.isnan(total[row]) else []
        pushes.append(pushed)
    return [GroupSummary(id, *mean_and_std(rewards), sum(pushes)) for id, (rewards, pushes) in found.items()]


@dataclass(slots=True)
class Learned:
    """One completion in the forward of the last update that saw it."""

    update: int
    rollouts: Rollouts  # the completion, with what the update read
    numbers: dict[str, Any]  # fields of a `TokenRecord`: [n] over its drawn tokens, or None


def learned_from(
    step: Step, rows: Collection[int], objective: Objective, num_minibatches: int
) -> dict[int, list[Learned]]:
    """What the step's updates saw of the completions `rows`, by their index in the exploration, piece by piece."""
    found: dict[int, list[Learned]] = {row: [] for row in rows}
    last = len(step.passes.updates) - 1
    for minibatch, micro_batch in (
        (i, micro_batch)
        for i, micro_batches in enumerate(step.micro_batches)
        for micro_batch in micro_batches
        if micro_batch.scored
    ):
        update = last - (last - minibatch) % num_minibatches
        # Copied from the device at once, not completion by completion.
        rollouts = micro_batch.rollouts.to("cpu")
        scored = micro_batch.scored
        assert scored is not None
        numbers = [values if values is None else values.cpu() for values in (scored.logp, scored.entropy, scored.read)]
        for index, row in enumerate(rollouts.row.tolist()):
            if row in found:
                found[row].append(Learned(update, *_seen(rollouts, numbers, index, objective)))
    return found


def _seen(rollouts: Rollouts, numbers: list[Any], index: int, objective: Objective) -> tuple[Rollouts, dict[str, Any]]:
    """The completion at an index of a micro-batch's rollouts, and what its update saw of it.

    Args:
        rollouts: The pack's, on the CPU.
        numbers: Log-probs, entropies and what was read, of all tokens of the micro-batch.
        index: Of the completion.
        objective: Of the run.
    """
    row = torch.tensor([index])
    tokens, one = take(row, rollouts.lengths), rollouts.select(row)
    logp, entropy, divergence = (values if values is None else values[tokens] for values in numbers)
    assert logp is not None and entropy is not None
    with torch.enable_grad():
        leaf = logp.clone().requires_grad_()
        # A divergence of whole distributions has no gradient by the drawn token's log-prob alone: it is in no push.
        terms = objective.terms(leaf, entropy, one, divergence)
        old_logp = logp if one.old_logp is None else one.old_logp
        factor = objective.factor(old_logp, one)
        weight = one.weight * factor
        (push,) = torch.autograd.grad((weight * terms.total).sum(), leaf)
    clip = terms.surrogate.clipped_high.to(torch.int8) - terms.surrogate.clipped_low.to(torch.int8)
    return one, {
        "old_logp": one.old_logp,
        "update_logp": logp,
        "ref_logp": one.ref_logp,
        "surrogate": terms.surrogate.value.detach(),
        "kl": None if one.ref_logp is None and divergence is None else terms.kl.detach(),
        "correction": factor if objective.correction.reads_sampler else None,
        "push": push,
        "clip": torch.where((weight != 0) & (one.advantage != 0), clip, 0),
        "entropy_update": entropy,
    }


class Candidates:
    """The groups of this rank that may be recorded. Make it before the step's updates, on every rank."""

    def __init__(self, step: Step, module: GRPOModule, num_groups: int, measure: Measure) -> None:
        self.step, self.module, self.measure = step, module, measure
        exploration = step.exploration
        everyone = [group for groups in ranks.gather(summarise(exploration)) for group in groups]
        self.choice = Choice.from_groups(everyone, num_groups)
        chosen = [row for row, id in enumerate(exploration.prompt_ids) if id in self.choice.prompt_ids]
        self.prompt_ids = [exploration.prompt_ids[row] for row in chosen]
        self.rollouts = exploration.rollouts.select(torch.tensor(chosen, dtype=torch.int64))
        self.before = measure(self.rollouts)
        is_fresh = exploration.policy_version == module.policy.version or module.old_policy.is_proximal
        is_known = is_fresh and module.old_policy.is_policy
        self.old_logp = self.before.logp if is_known else None if is_fresh else self.rollouts.sampler_logp

    def records(self, num_minibatches: int) -> list[GroupRecord]:
        """The groups of all ranks that are recorded. Call it after the step's updates, on every rank."""
        after = self.measure(self.rollouts)
        roles = self.choice.roles(self._movement(after))
        rows: dict[int, list[Row]] = {}
        for id, row in zip(self.prompt_ids, Row.all_of(self.rollouts), strict=True):
            rows.setdefault(id, []).append(row)
        chosen = {int(row.rollouts.row) for id, group in rows.items() for row in group if id in roles}
        learned = learned_from(self.step, chosen, self.module.objective, num_minibatches)
        mine = {id: self._group(roles[id], group, learned, after) for id, group in rows.items() if id in roles}
        everyone = {id: record for groups in ranks.gather(mine) for id, record in groups.items()}
        return [everyone[id] for id in roles]

    def _movement(self, after: TokenLogp) -> dict[int, float]:
        """Mean |Δ log p| of each group of all ranks, by prompt id."""
        moved: dict[int, list[float]] = {}
        change = (after.logp - self.before.logp).abs().double().split(self.rollouts.lengths.tolist())
        for id, part in zip(self.prompt_ids, change, strict=True):
            moved.setdefault(id, []).extend(part.tolist())
        mine = {id: sum(parts) / len(parts) for id, parts in moved.items()}
        return {id: value for groups in ranks.gather(mine) for id, value in groups.items()}

    def _group(
        self, roles: list[str], rows: list[Row], learned: dict[int, list[Learned]], after: TokenLogp
    ) -> GroupRecord:
        exploration, tokenizer = self.step.exploration, self.module.policy.tokenizer
        completions, updates = [], []
        for row in rows:
            index = int(row.rollouts.row)
            # Among the pieces of one conversation.
            seen = next((one for one in learned[index] if next(Row.all_of(one.rollouts)).ids == row.ids), None)
            updates += [] if seen is None else [seen.update]
            sample, tokens = exploration.samples[index], self._tokens(row, seen, after)
            completions.append(completion_record(sample, exploration.scores, index, row, tokens))
        prompt = rows[0].prompt(exploration.samples[int(rows[0].rollouts.row)], tokenizer)
        return group_record("train", roles, prompt, max(updates, default=None), completions, tokenizer)

    def _tokens(self, row: Row, learned: Learned | None, after: TokenLogp) -> TokenRecord:
        """The tokens of one completion."""
        pick, own, objective = row.tokens, row.rollouts, self.module.objective
        numbers: dict[str, Tensor | None] = {
            "sampler_logp": own.sampler_logp,
            "old_logp": None if self.old_logp is None else self.old_logp[pick],
            "after_logp": after.logp[pick],
            "advantage": own.advantage,
            "weight": own.weight,
        }
        numbers |= measured(self.before, pick, "before") | measured(after, pick, "after")
        learns_from_all = not objective.learns_from_advantage_alone or objective.reward_kl is not None
        if learned is not None:
            seen, logp, push = learned.numbers, learned.numbers["update_logp"], learned.numbers["push"]
            numbers |= seen | curves(objective, learned.rollouts, logp, push, after.logp[pick])
            if seen["correction"] is not None:
                numbers["weight"] = own.weight * seen["correction"]
        elif not learns_from_all and not bool((own.weight * own.advantage).any()):
            # No update looked at it, since it adds nothing.
            none = torch.zeros_like(own.weight)
            numbers |= {"surrogate": none, "push": none, "clip": none.to(torch.int8)}
        return row.record(self.module.policy.tokenizer, **numbers)
