"""Diagnostics of an update: numbers to watch while the objective is maximised."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import SurrogateResult


@dataclass(slots=True)
class Diagnostics:
    """Sums over the tokens whose weight is not 0, so that packs and ranks add up. `ratio_max` is a maximum.

    Divide by `tokens` for means: only `objective` has the weights in it.
    """

    tokens: Tensor
    """The number of these tokens."""
    pushing: Tensor
    """Those with an advantage."""
    unreachable: Tensor
    """Pushing tokens whose bound lies beyond probability 1."""
    objective: Tensor
    """J, weights included."""
    entropy: Tensor
    ratio: Tensor
    """π_θ/π_old."""
    kl_ref: Tensor
    """Estimates of KL(π_θ || π_ref); 0 without a reference."""
    kl_old: Tensor
    """Estimates of KL(π_old || π_θ)."""
    clipped_low: Tensor
    """Pushing tokens at their lower bound."""
    clipped_high: Tensor
    """Pushing tokens at their upper bound."""
    ratio_max: Tensor
    """The largest π_θ/π_old."""

    def __add__(self, other: "Diagnostics") -> "Diagnostics":
        """The diagnostics of both together."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Diagnostics(**sums | {"ratio_max": torch.maximum(self.ratio_max, other.ratio_max)})

    def reduce(self, reduce: Callable[..., Tensor]) -> "Diagnostics":
        """The diagnostics of all ranks together; `reduce` is the strategy's, with `reduce_op` sum or max."""
        names = [f.name for f in fields(self) if f.name != "ratio_max"]
        sums = reduce(torch.stack([getattr(self, name) for name in names]), reduce_op="sum")
        return Diagnostics(
            **dict(zip(names, sums, strict=True)), ratio_max=reduce(self.ratio_max.clone(), reduce_op="max")
        )

    def on_host(self, *more: Tensor) -> tuple["Diagnostics", list[Tensor]]:
        """These and the numbers `more` on the CPU, for one wait for a GPU."""
        names = [f.name for f in fields(self)]
        numbers = torch.stack([*(getattr(self, name) for name in names), *(number.float() for number in more)])
        values = list(numbers.cpu())
        return Diagnostics(**dict(zip(names, values, strict=False))), values[len(names) :]

    def metrics(self) -> dict[str, Tensor]:
        """The numbers to log, by name: means per token, but for the objective and the largest ratio."""
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
        change: Tensor,
    ) -> "Diagnostics":
        """The diagnostics of one pack.

        Args:
            rollouts: Its tokens.
            weight: [N] what each token counts in J, corrected.
            surrogate: Their values and bounds.
            objective: J.
            entropy: [N].
            kl_ref: [N] estimate of KL(π_θ || π_ref).
            change: [N] log(π_θ/π_old).
        """
        counts = weight != 0
        pushing = counts & (rollouts.advantage != 0)
        ratio = change.exp()

        def total(values: Tensor, where: Tensor = counts) -> Tensor:
            return torch.where(where, values.detach(), 0.0).sum()

        return cls(
            tokens=counts.sum().float(),
            pushing=pushing.sum().float(),
            unreachable=total(surrogate.unreachable, pushing),
            objective=objective.detach(),
            entropy=total(entropy),
            ratio=total(ratio),
            kl_ref=total(kl_ref),
            # k3 of KL(old || new): the tokens were drawn from π_old, so here the estimate is unbiased.
            kl_old=total(change.expm1() - change),
            clipped_low=total(surrogate.clipped_low, pushing),
            clipped_high=total(surrogate.clipped_high, pushing),
            ratio_max=torch.where(counts, ratio, 0.0).max(),
        )
