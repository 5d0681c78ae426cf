"""Filters: which groups of a step are learned from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.advantages import has_spread
from grpo_lightning.rewards.scorer import Scores
from grpo_lightning.training.explorer import Exploration
from grpo_lightning.types import UsageError

TOTAL = "total"
"""Stands for the weighted sum of all rewards."""


class GroupFilter(ABC):
    """Which groups are worth learning from, by their rewards."""

    reward: str | None = TOTAL
    """What it looks at: `total`, a reward's name, or None for the first reward that is learned from."""

    @abstractmethod
    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """[B] rewards (NaN: a reward failed), [B] int64 group of each -> [num_groups] bool: the groups that stay."""


class HasSpread(GroupFilter):
    """Keeps groups whose answers are neither all right nor all wrong (DAPO, arXiv 2503.14476, Eq. 11).

    That is a matter of correctness. The total also has spread where wrong answers differ in form or length, which
    would let groups pass that have nothing right.

    Args:
        reward: The name of the reward that must differ inside the group, or `total` for the weighted sum. None is the
            first reward of the list whose weight is not 0.
    """

    def __init__(self, reward: str | None = None) -> None:
        self.reward = reward

    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return has_spread(reward, group, num_groups)


@dataclass
class DynamicSampling:
    """Draws more prompts until `prompts_per_step` groups pass the filter (DAPO, arXiv 2503.14476, Sec. 3.2).

    Every round draws as many prompts as are still missing. If `max_rounds` do not suffice, groups that did not pass
    fill the step up.

    Args:
        filter: The groups that stay.
        max_rounds: Rounds of a step, the first one included.
    """

    filter: GroupFilter = field(default_factory=HasSpread)
    max_rounds: int = 10

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise UsageError(f"loop.dynamic_sampling.max_rounds={self.max_rounds}: give 1 or more")

    def passing(self, exploration: Exploration) -> list[int]:
        """Places of the prompts, of all ranks, whose groups pass. Every rank must call it."""
        group = exploration.rollouts.group
        reward = self._looked_at(exploration.scores)
        passes = self.filter(reward, group, len(exploration.rollouts.prompt_lengths))
        mine = [exploration.samples[row].prompt.id for row in range(len(group)) if passes[group[row]]]
        return [place for places in ranks.gather(mine) for place in places]

    def _looked_at(self, scores: Scores) -> Tensor:
        """[B] float64: the reward that the filter looks at; NaN where the sample is not learned from."""
        total = torch.tensor(scores.total, dtype=torch.float64)
        name = (scores.learned_from or [TOTAL])[0] if self.filter.reward is None else self.filter.reward
        if name == TOTAL:
            return total
        return torch.tensor(scores.results[name].value, dtype=torch.float64).masked_fill(total.isnan(), torch.nan)
