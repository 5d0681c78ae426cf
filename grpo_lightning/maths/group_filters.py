"""Group filters: which groups of a step are learned from."""

from abc import ABC, abstractmethod

from torch import Tensor

from grpo_lightning.maths.advantages import has_spread

TOTAL = "total"
"""The name of the weighted sum of all rewards."""


class GroupFilter(ABC):
    """Which groups are worth learning from, by their rewards."""

    reward: str | None = TOTAL
    """The reward that it sees: `total`, a reward's name, or None for the first reward whose weight is not 0."""

    @abstractmethod
    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """[num_groups] bool, True for groups that stay, from [B] rewards (NaN: failed) and [B] int64 groups."""


class HasSpread(GroupFilter):
    """Keeps groups whose answers are neither all right nor all wrong (DAPO, arXiv 2503.14476, Eq. 11).

    The others have no gradient, so the batch would be smaller than it looks. Look at correctness: the total also has
    spread where wrong answers differ only in form or length.

    Args:
        reward: The name of the reward that must differ inside the group, or `total` for the weighted sum. None is the
            first reward of the list whose weight is not 0.
    """

    def __init__(self, reward: str | None = None) -> None:
        self.reward = reward

    def __call__(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """[num_groups] bool: whether the rewards of the group differ."""
        return has_spread(reward, group, num_groups)
