"""A bound on the divergence of each token in place of a bound on its ratio."""

from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import at_least, require


class DPPO(Surrogate):
    """DPPO: sg(min(ratio, cap)) Â log π_θ, 0 for a token that has moved too far the way that Â pushes.

    Too far is a divergence of π_θ from π_old above a threshold, over two events: this token, or another one
    (arXiv 2602.04879). A ratio bounds unlikely tokens hardest, whose change hardly matters, and lets likely ones move
    far. This bounds what changes the distribution.

    π_old is the sampler where rollouts are of an earlier policy (`RecordedLogp`); then this bounds staleness and the
    updates of a step together. The correction `ProbabilityGap` bounds staleness alone.

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
        self.divergence, self.low, self.high, self.cap = divergence, low, high, cap

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        advantage, change = rollouts.advantage, log_ratio(logp.detach(), old_logp)
        distance = self.distance(logp.detach(), old_logp)
        high = (change > 0) & (distance > self.high) & (advantage > 0)
        low = (change < 0) & (distance > self.low) & (advantage < 0)
        value = change.exp().clamp(max=self.cap) * advantage * logp
        # With π_θ at 1 the distance is the largest there can be.
        unreachable = (self.distance(torch.zeros_like(old_logp), old_logp) < self.high) & (advantage > 0)
        return SurrogateResult(torch.where(high | low, 0.0, value), low, high, unreachable)

    def distance(self, logp: Tensor, old_logp: Tensor) -> Tensor:
        """[N] the divergence of each token's two events."""
        old, new = old_logp.exp(), logp.exp()
        if self.divergence == "tv":
            return (new - old).abs()
        # As 1 - p for p near 1: of the others, the probability is at least that of rounding.
        tiny = torch.finfo(torch.float32).eps
        others_old, others_new = (-old_logp.expm1()).clamp(min=0), (-logp.expm1()).clamp(min=tiny)
        return old * (old_logp - logp) + torch.xlogy(others_old, others_old / others_new)
