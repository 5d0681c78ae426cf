"""DPPO: a bound on the divergence of each token in place of a bound on its ratio."""

from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import at_least, require


class DPPO(Surrogate):
    """DPPO: sg(min(ratio, cap)) Â log π_θ, and 0 for a token that has moved too far in the direction of Â.

    Too far is a divergence of π_θ from π_old above a threshold, over two events: this token, or any other token
    (arXiv 2602.04879). A clipped ratio bounds unlikely tokens most, whose change hardly matters, and lets likely tokens
    move far. The divergence bounds the change of the distribution.

    With rollouts of an earlier policy (`RecordedLogp`), π_old is the sampler: the divergence then bounds staleness and
    the updates of a step together. The correction `ProbabilityGap` bounds staleness alone.

    Args:
        divergence: `tv`, total variation |π_θ - π_old|; `kl`, KL(π_old || π_θ) of the two events.
        low: Largest divergence of a bad token whose probability has fallen. verl and prime-rl take 0.2.
        high: Largest divergence of a good token whose probability has risen.
        cap: Largest factor.
    """

    def __init__(
        self, divergence: Literal["tv", "kl"] = "tv", low: float = 0.2, high: float = 0.2, cap: float = 20.0
    ) -> None:
        require(low > 0 and high > 0, f"low={low}, high={high} of DPPO: give more than 0")
        at_least("cap", cap, 1, "DPPO")
        self.divergence = divergence
        self.low = low
        self.high = high
        self.cap = cap

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        advantage = rollouts.advantage
        change = log_ratio(logp.detach(), old_logp)
        distance = self.distance(logp.detach(), old_logp)
        is_high = (change > 0) & (distance > self.high) & (advantage > 0)
        is_low = (change < 0) & (distance > self.low) & (advantage < 0)
        value = change.exp().clamp(max=self.cap) * advantage * logp
        # The largest possible distance is the distance of π_θ = 1.
        unreachable = (self.distance(torch.zeros_like(old_logp), old_logp) < self.high) & (advantage > 0)
        return SurrogateResult(torch.where(is_high | is_low, 0.0, value), is_low, is_high, unreachable)

    def distance(self, logp: Tensor, old_logp: Tensor) -> Tensor:
        """[N] float32 divergence over two events: the token, or any other token."""
        old = old_logp.exp()
        if self.divergence == "tv":
            return (logp.exp() - old).abs()
        # expm1 computes 1 - p exactly for p near 1. The new probability of other tokens is at least float32's rounding.
        others_old = (-old_logp.expm1()).clamp(min=0)
        others_new = (-logp.expm1()).clamp(min=torch.finfo(torch.float32).eps)
        return old * (old_logp - logp) + torch.xlogy(others_old, others_old / others_new)
