"""Dynamic sampling: more prompts until enough groups pass a filter."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.group_filters import TOTAL, GroupFilter, HasSpread
from grpo_lightning.rewards.results import Scores
from grpo_lightning.training.explorer import Exploration
from grpo_lightning.types import at_least


@dataclass
class DynamicSampling:
    """Draws more prompts until `prompts_per_step` groups pass the filter (DAPO, arXiv 2503.14476, Sec. 3.2).

    Groups whose rewards are all equal have no advantage. With them replaced, every step learns from as many groups.
    Every round draws as many prompts as are still missing. If `max_rounds` do not suffice, groups that did not pass
    fill the step.

    Args:
        filter: Which groups pass.
        max_rounds: Largest number of rounds in a step, the first one included.
    """

    filter: GroupFilter = field(default_factory=HasSpread)
    max_rounds: int = 10

    def __post_init__(self) -> None:
        at_least("loop.dynamic_sampling.max_rounds", self.max_rounds, 1)

    def passing(self, exploration: Exploration) -> list[int]:
        """The ids of the prompts, of all ranks, whose groups pass. Every rank must call it."""
        rollouts = exploration.rollouts
        begins = rollouts.begins
        reward = self._looked_at(exploration.scores)[rollouts.row[begins]]
        passes = self.filter(reward, rollouts.group[begins], len(rollouts.prompt_lengths))
        ids = exploration.prompt_ids
        mine = [id for id, group in zip(ids, rollouts.group.tolist(), strict=True) if passes[group]]
        return [id for ids in ranks.gather(mine) for id in ids]

    def _looked_at(self, scores: Scores) -> Tensor:
        """[samples] float64, the reward that the filter looks at; NaN where the sample is not learned from."""
        total = torch.tensor(scores.total, dtype=torch.float64)
        name = (scores.learned_from or [TOTAL])[0] if self.filter.reward is None else self.filter.reward
        if name == TOTAL:
            return total
        return torch.tensor(scores.results[name].value, dtype=torch.float64).masked_fill(total.isnan(), torch.nan)
