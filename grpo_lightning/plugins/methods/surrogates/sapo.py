"""SAPO: a soft gate in place of a clip."""

import torch
from torch import Tensor

from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import require


class SAPO(Surrogate):
    """SAPO: Â * sigmoid(τ (ratio - 1)) * 4/τ, a soft gate instead of a clip (arXiv 2511.20347, Eq. 5-6).

    The gradient of a token fades with the distance of its ratio from 1 instead of ending at a bound. At ratio 1 it
    equals the gradient of `Clipped`.

    Args:
        tau_good: τ where Â > 0.
        tau_bad: τ elsewhere; larger, so that bad tokens fade sooner.
    """

    def __init__(self, tau_good: float = 1.0, tau_bad: float = 1.05) -> None:
        require(tau_good > 0, f"tau_good={tau_good}: give more than 0; the paper takes 1.0")
        require(tau_bad > 0, f"tau_bad={tau_bad}: give more than 0; the paper takes 1.05")
        self.tau_good = tau_good
        self.tau_bad = tau_bad

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        ratio = log_ratio(logp, old_logp).exp()
        tau = torch.where(rollouts.advantage > 0, self.tau_good, self.tau_bad)
        return SurrogateResult.unbounded(rollouts.advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau)
