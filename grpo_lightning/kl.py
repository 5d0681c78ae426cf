"""KL estimators: D_KL[π_θ || π_ref] of one token from the two log-probs of the sampled token."""

from abc import ABC, abstractmethod

from torch import Tensor

from grpo_lightning.surrogates import MAX_LOG_RATIO


class KLEstimator(ABC):
    """A per-token estimate of the reverse KL divergence. Gradient flows through `logp` alone."""

    @abstractmethod
    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """[N] log π_θ, [N] log π_ref -> [N]."""


class K3(KLEstimator):
    """k3 = π_ref/π_θ - log(π_ref/π_θ) - 1 (Schulman 2020; DeepSeekMath Eq. 4).

    Unbiased, never negative, 0 where the two agree.

    """

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        # Clamped where exp overflows, but not below: there the gradient, 1 - π_ref/π_θ, is 1, the full pull down.
        difference = (ref_logp - logp).clamp(max=MAX_LOG_RATIO)
        # Near 0 the value is difference²/2, which exp(difference) - difference - 1 would lose in rounding.
        return difference.expm1() - difference
