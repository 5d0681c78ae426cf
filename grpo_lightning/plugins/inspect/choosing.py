"""Which groups of a step are recorded: the most mixed, the most moved, the worst and the best."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.maths.advantages import has_spread

MIXED, MOVED, WORST, BEST = ROLES = ("mixed", "moved", "worst", "best")
"""The reasons for which groups are recorded, in turn."""


@dataclass(slots=True, frozen=True)
class GroupSummary:
    """What decides whether a group is recorded."""

    prompt_id: int
    mean: float
    """Mean reward; NaN if every completion's reward failed."""
    std: float
    push: float
    """Sum over the tokens of |weight * Â| (1 - p), p the probability that the token was drawn with."""


@dataclass(slots=True)
class Choice:
    """The groups of all ranks that may be recorded, known before the step's updates."""

    taken: dict[int, str]
    pushed: list[int]
    """The prompt ids of those pushed hardest among the others: `num_moved` of them will be recorded."""
    num_moved: int
    firsts: dict[str, int]
    """By role, the prompt id of the group that has most of it."""

    @classmethod
    def from_groups(cls, groups: Sequence[GroupSummary], num_groups: int) -> "Choice":
        """The choice of `num_groups` among the groups of all ranks; of equal ones the lower prompt id comes first.

        The roles take a group in turn, none twice. Twice as many groups as there are turns for `moved` stay open:
        which of them moved most is known after the updates.
        """
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
        firsts = dict(self.firsts)
        if by_movement and movement[by_movement[0]] > 0:
            firsts[MOVED] = by_movement[0]
        for id, roles in found.items():
            roles += [role for role, first in firsts.items() if first == id and role not in roles]
        return dict(sorted(found.items(), key=lambda item: ROLES.index(item[1][0])))


def summarise(exploration: Exploration) -> list[GroupSummary]:
    """The groups of this rank that are learned from. Their advantages and weights must be there."""
    rollouts, total = exploration.rollouts, exploration.scores.total
    push = (rollouts.weight * rollouts.advantage).abs().double()
    if rollouts.sampler_logp is not None:
        push *= -rollouts.sampler_logp.double().expm1()
    per_row = [float(part.sum()) for part in push.split(rollouts.lengths.tolist())]
    found: dict[int, tuple[list[float], list[float]]] = {}
    rows, begins = rollouts.row.tolist(), rollouts.begins.tolist()
    for row, is_new, pushed, prompt_id in zip(rows, begins, per_row, exploration.prompt_ids, strict=True):
        rewards, pushes = found.setdefault(prompt_id, ([], []))
        rewards += [total[row]] if is_new and not math.isnan(total[row]) else []
        pushes.append(pushed)
    return [GroupSummary(id, *mean_and_std(rewards), sum(pushes)) for id, (rewards, pushes) in found.items()]


def mean_and_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; NaN and 0 without any, and 0 where rewards differ by rounding alone."""
    if not rewards:
        return math.nan, 0.0
    differ = has_spread(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64), 1)
    return statistics.fmean(rewards), statistics.pstdev(rewards) if differ else 0.0
