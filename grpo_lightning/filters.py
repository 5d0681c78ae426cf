"""Filters: which groups of a step are learned from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.advantages import has_spread
from grpo_lightning.explorer import Exploration
from grpo_lightning.types import UsageError


class GroupFilter(ABC):
    """Which groups are worth learning from, by their rewards."""

    @abstractmethod
    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """[B] total rewards (NaN: failed), [B] int64 group of each -> [num_groups] bool: the groups that stay."""


class HasSpread(GroupFilter):
    """Keeps groups whose rewards differ: in the others every group-relative advantage is 0 (DAPO, Eq. 11)."""

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
        reward = torch.tensor(exploration.scores.total, dtype=torch.float64)
        passes = self.filter(reward, group, len(exploration.rollouts.prompt_lengths))
        mine = [exploration.samples[row].prompt.id for row in range(len(group)) if passes[group[row]]]
        return [place for places in ranks.gather(mine) for place in places]
