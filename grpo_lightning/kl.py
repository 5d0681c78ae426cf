"""KL estimators: D_KL[π_θ || π_ref] of one token from the two log-probs of the sampled token."""

from abc import ABC, abstractmethod

from torch import Tensor

from grpo_lightning.surrogates import log_ratio


class KLEstimator(ABC):
    """A per-token estimate of the reverse KL divergence. Gradient flows through `logp` alone."""

    @abstractmethod
    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """[N] log π_θ, [N] log π_ref -> [N]."""


class K3(KLEstimator):
    """k3 = π_ref/π_θ - log(π_ref/π_θ) - 1: unbiased, never negative, 0 where they agree (Schulman 2020; DeepSeekMath Eq. 4)."""

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        difference = log_ratio(ref_logp, logp)
        return difference.exp() - difference - 1
