"""Filters: the groups and the tokens that are learned from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import has_spread
from grpo_lightning.maths.prepared import Prepared
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import TOTAL, at_least

ENTROPY_RANK = "entropy_rank"  # column: the fraction of the step's tokens, of all ranks, where π_old has less entropy


class GroupFilter(ABC):
    """The groups that are learned from, decided by their rewards."""

    reward: str | None = TOTAL
    """The reward that it sees: `total`, a reward's name, or None for the first reward whose weight is not 0."""

    @abstractmethod
    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """[num_groups] bool, True for groups that stay, from [B] rewards (NaN: failed) and [B] int64 groups."""


class HasSpread(GroupFilter):
    """Keeps groups whose answers are neither all right nor all wrong (DAPO, arXiv 2503.14476, Eq. 11).

    The others have no gradient. Look at correctness: the total also has spread where wrong answers differ only in form
    or length.

    Args:
        reward: The reward that must differ inside the group, or `total` for the weighted sum. None is the first reward
            whose weight is not 0.
    """

    def __init__(self, reward: str | None = None) -> None:
        self.reward = reward

    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return has_spread(reward, group, num_groups)


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


class TokenMask(Prepared, ABC):
    """A factor of each token's weight, decided once per step before any log-prob. 0 leaves the token out.

    It sees Â too, unless that needs log-probs (`objective.reward_kl`): then Â is 0 here.
    """

    reads_entropy: bool = False
    """True if it needs the column `entropy_rank`, which costs a pass over the rollouts."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[N] bool, True for tokens that stay, or float32 factors from 0 on; of whole groups."""


class Truncated(TokenMask):
    """Leaves out completions cut off at `max_new_tokens`: DAPO's overlong filtering (arXiv 2503.14476, Sec. 3.4).

    A sound solution that only ran out of room is then not punished. Its reward still counts in the group's baseline.
    """

    def __call__(self, rollouts: Rollouts) -> Tensor:
        return rollouts.spread(~rollouts.truncated)


def mask_factor(masks: Sequence[TokenMask], rollouts: Rollouts) -> Tensor:
    """[N] float32, the product of the masks' factors."""
    factor = torch.ones_like(rollouts.weight)
    for mask in masks:
        factor = factor * mask(rollouts)
    return factor
