"""Group filters: which groups of a step are learned from."""

from abc import ABC, abstractmethod

from torch import Tensor

from grpo_lightning.maths.advantages import has_spread

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
