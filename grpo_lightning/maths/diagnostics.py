"""Diagnostics of an update: sums over tokens that show how the objective is maximised."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import SurrogateResult


class Sums:
    """A dataclass of sums, so that micro-batches and ranks add up. Its last field is a maximum."""

    @property
    def numbers(self) -> list[Tensor]:
        """The sums, then the maximum."""
        return [*vars(self).values()]

    def __add__(self, addend: Self) -> Self:
        *sums, maxima = zip(self.numbers, addend.numbers, strict=True)
        numbers = [left + right for left, right in sums] + [torch.maximum(*maxima)]
        return type(self)(*numbers)

    def reduce(self, reduce: Callable[..., Tensor]) -> Self:
        """Adds up the numbers of all ranks; `reduce` is the strategy's, with `reduce_op` sum or max."""
        *sums, maximum = self.numbers
        numbers = [*reduce(torch.stack(sums), reduce_op="sum"), reduce(maximum.clone(), reduce_op="max")]
        return type(self)(*numbers)

    def on_host(self, *extra: Tensor) -> tuple[Self, list[Tensor]]:
        """Copies these numbers and the numbers `extra` to the CPU in one transfer, so that a GPU is waited for once."""
        numbers = self.numbers
        values = list(torch.stack([*numbers, *(number.float() for number in extra)]).cpu())
        return type(self)(*values[: len(numbers)]), values[len(numbers) :]


@dataclass
class Diagnostics(Sums):
    """Sums over the tokens whose weight is not 0. Each is a float32 scalar; only `objective` is weighted."""

    tokens: Tensor
    """The number of tokens."""
    has_advantage: Tensor
    """The number of tokens with an advantage."""
    unreachable: Tensor
    """The number of tokens with an advantage whose bound lies beyond probability 1."""
    objective: Tensor
    """J, the weighted sum."""
    entropy: Tensor
    """The sum of the entropies of π_θ, in nats."""
    ratio: Tensor
    """The sum of π_θ/π_old."""
    kl_ref: Tensor
    """The sum of estimates of KL(π_θ || π_ref), in nats; 0 without a reference."""
    kl_old: Tensor
    """The sum of estimates of KL(π_old || π_θ), in nats."""
    clipped_low: Tensor
    """The number of tokens with an advantage at their lower bound."""
    clipped_high: Tensor
    """The number of tokens with an advantage at their upper bound."""
    ratio_max: Tensor
    """The largest π_θ/π_old."""

    def metrics(self) -> dict[str, Tensor]:
        """Returns metrics by name: means per token, the objective, and the largest ratio."""
        tokens = self.tokens.clamp(min=1)
        return {
            "policy/objective": self.objective,
            "policy/entropy": self.entropy / tokens,
            "policy/ratio_mean": self.ratio / tokens,
            "policy/ratio_max": self.ratio_max,
            "policy/kl_old": self.kl_old / tokens,
            "policy/kl_ref": self.kl_ref / tokens,
            "policy/clip_low": self.clipped_low / tokens,
            "policy/clip_high": self.clipped_high / tokens,
            "policy/unreachable": self.unreachable / tokens,
        }

    @classmethod
    def from_update(
        cls,
        rollouts: Rollouts,
        weight: Tensor,
        surrogate: SurrogateResult,
        objective: Tensor,
        entropy: Tensor,
        kl_ref: Tensor,
        log_ratio_to_old: Tensor,
    ) -> "Diagnostics":
        """Sums the numbers of one micro-batch.

        Args:
            rollouts: The rollouts of the micro-batch.
            weight: [N] float32 weights, corrections included.
            surrogate: Which tokens are at a bound.
            objective: J of the micro-batch.
            entropy: [N] float32 entropies of π_θ.
            kl_ref: [N] float32 estimates of KL(π_θ || π_ref).
            log_ratio_to_old: [N] float32 log(π_θ/π_old).
        """
        counts = weight != 0
        has_advantage = counts & (rollouts.advantage != 0)
        ratio = log_ratio_to_old.exp()

        def total(values: Tensor, mask: Tensor = counts) -> Tensor:
            return torch.where(mask, values.detach(), 0.0).sum()

        return cls(
            tokens=counts.sum().float(),
            has_advantage=has_advantage.sum().float(),
            unreachable=total(surrogate.unreachable, has_advantage),
            objective=objective.detach(),
            entropy=total(entropy),
            ratio=total(ratio),
            kl_ref=total(kl_ref),
            # k3 of KL(π_old || π_θ). The tokens were sampled from π_old, so the estimate is unbiased.
            kl_old=total(log_ratio_to_old.expm1() - log_ratio_to_old),
            clipped_low=total(surrogate.clipped_low, has_advantage),
            clipped_high=total(surrogate.clipped_high, has_advantage),
            ratio_max=torch.where(counts, ratio, 0.0).max(),
        )
