"""Filters of groups and masks of tokens: what is learned from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning.maths.advantages import has_spread
from grpo_lightning.maths.prepared import Prepared
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import TOTAL, at_least

ENTROPY_RANK = "entropy_rank"
"""Name of the column with the fraction of the step's tokens, over all ranks, at which π_old has less entropy."""


class GroupFilter(ABC):
    """Chooses the groups that are learned from, by their rewards."""

    reward: str | None = TOTAL
    """The reward that decides: `total`, a reward's name, or None for the first reward whose weight is not 0."""

    @abstractmethod
    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """[num_groups] bool, True for groups that stay, from [B] rewards (NaN: failed) and [B] int64 groups."""


class HasSpread(GroupFilter):
    """Keeps groups whose answers are neither all right nor all wrong (DAPO, arXiv 2503.14476, Eq. 11).

    Groups whose answers are all right or all wrong have no gradient. The reward should be correctness: the total also
    differs between wrong answers of different form or length.

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
    """Samples further prompts until `prompts_per_step` groups pass the filter (DAPO, arXiv 2503.14476, Sec. 3.2).

    Groups whose rewards are all equal have no advantage. If they are replaced, every step learns from the same number
    of groups. Every round takes as many prompts as are still missing. If `max_rounds` are not enough, groups that did
    not pass fill the step.

    Args:
        filter: Decides which groups pass.
        max_rounds: Largest number of rounds in a step, including the first.
    """

    filter: GroupFilter = field(default_factory=HasSpread)
    """Decides which groups pass."""
    max_rounds: int = 10
    """Largest number of rounds in a step, including the first."""

    def __post_init__(self) -> None:
        at_least("loop.dynamic_sampling.max_rounds", self.max_rounds, 1)


class TokenMask(Prepared, ABC):
    """Multiplies each token's weight by a factor; 0 leaves the token out. It is computed once per step.

    Masks come before log-probs. They can read Â, unless Â needs log-probs (`objective.reward_kl`): then Â is 0 here.
    """

    reads_entropy: bool = False
    """True if it reads the column `entropy_rank`, which costs a pass over the rollouts."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[N] bool, True for tokens that stay, or float32 factors of 0 or more. Groups in `rollouts` are complete."""


class Truncated(TokenMask):
    """Leaves out completions cut off at `max_new_tokens`: DAPO's overlong filtering (arXiv 2503.14476, Sec. 3.4).

    A sound solution that was only too long is not punished. Its reward still counts in the group's baseline.
    """

    def __call__(self, rollouts: Rollouts) -> Tensor:
        return rollouts.per_token(~rollouts.truncated)


def mask_factor(masks: Sequence[TokenMask], rollouts: Rollouts) -> Tensor:
    """[N] float32, the product of the factors of all masks."""
    factor = torch.ones_like(rollouts.weight)
    for mask in masks:
        factor = factor * mask(rollouts)
    return factor
