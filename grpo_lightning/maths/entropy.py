"""Entropy bonuses: the coefficient c of the entropy in the objective, against a collapse to few answers."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from grpo_lightning.types import Stateful, require


class EntropyBonus(Stateful, ABC):
    """Chooses the coefficient of the entropy of π_θ at each token. It may change from update to update."""

    @property
    @abstractmethod
    def coefficient(self) -> float:
        """c of the next update, 0 or more. At 0 the entropy has no gradient, which saves memory."""

    def observe(self, entropy: float) -> None:
        """Is called after each update with the mean entropy of its tokens over all ranks, in nats."""

    def metrics(self) -> dict[str, Tensor]:
        """Returns metrics of an update by name."""
        return {"policy/entropy_coefficient": torch.tensor(self.coefficient)}


class NoEntropy(EntropyBonus):
    """Gives no bonus (c = 0), as in most papers on GRPO."""

    coefficient = 0.0

    def metrics(self) -> dict[str, Tensor]:
        return {}


class FixedEntropy(EntropyBonus):
    """Gives the same bonus in the whole run.

    Args:
        coefficient: c; a large value makes completions random.
    """

    coefficient = 0.0

    def __init__(self, coefficient: float = 0.001) -> None:
        require(coefficient > 0, f"coefficient={coefficient} of FixedEntropy: give more than 0, or take NoEntropy")
        self.coefficient = coefficient
