"""KL estimates that are also unbiased off policy."""

from torch import Tensor

from grpo_lightning.maths.kl import K3, KLEstimator, log_ratio
from grpo_lightning.types import UsageError


class ImportanceWeighted(KLEstimator):
    """Multiplies another estimator by π_θ/π_old, so that value and gradient are unbiased off policy.

    For several updates per step, whose tokens were not sampled from the current policy (arXiv 2512.02556, Sec. 3.1).

    Args:
        kl: The estimator to multiply; k3 in the paper.
    """

    def __init__(self, kl: KLEstimator | None = None) -> None:
        self.kl = kl or K3()
        if self.kl.reads_distributions:
            raise UsageError(f"ImportanceWeighted.kl={type(self.kl).__name__}: it is exact already")

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        return log_ratio(logp, old_logp).exp() * self.kl(logp, ref_logp, old_logp)
