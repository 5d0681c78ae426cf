"""KL estimates that are unbiased off policy too."""

from torch import Tensor

from grpo_lightning.maths.kl import K3, KLEstimator, log_ratio
from grpo_lightning.types import require


class ImportanceWeighted(KLEstimator):
    """π_θ/π_old times another estimator: unbiased in value and gradient off policy too (arXiv 2512.02556, Sec. 3.1).

    For several updates per step, where the tokens were not drawn from the current policy.

    Args:
        kl: The other estimator; k3 in the paper.
    """

    def __init__(self, kl: KLEstimator | None = None) -> None:
        self.kl = kl or K3()
        require(not self.kl.reads_distributions, f"ImportanceWeighted.kl={type(self.kl).__name__}: it is exact already")

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        return log_ratio(logp, old_logp).exp() * self.kl(logp, ref_logp, old_logp)
