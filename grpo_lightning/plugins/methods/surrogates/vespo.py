"""VESPO: a soft weight of whole completions by the product of their ratios."""

import math

import torch
from torch import Tensor

from grpo_lightning.maths.kl import MAX_LOG_RATIO, log_ratio
from grpo_lightning.maths.ragged import segment_sum, segments
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import require

SMALLEST = math.log(1e-8)
"""Smallest log W, as in the authors' code."""


class VESPO(Surrogate):
    """VESPO: sg(φ(W)) Â log π_θ, with W the product of the completion's ratios (arXiv 2602.10693).

    φ(W) = W^k e^(λ (1 - W)) is 1 on policy, rises a little and falls to 0 far off policy: an importance weight of the
    whole completion whose variance is bounded without a clip or a division by the length. For stale rollouts.

    W is the product of π_θ/π_old. With rollouts of an earlier policy and `model.old_policy` at `RecordedLogp`, π_old is
    the sampler.

    Args:
        k_good: k where Â >= 0.
        lambda_good: λ where Â >= 0.
        k_bad: k elsewhere.
        lambda_bad: λ elsewhere.
    """

    def __init__(
        self, k_good: float = 2.0, lambda_good: float = 3.0, k_bad: float = 3.0, lambda_bad: float = 2.0
    ) -> None:
        self.k_good = k_good
        self.lambda_good = lambda_good
        self.k_bad = k_bad
        self.lambda_bad = lambda_bad
        for name, value in vars(self).items():
            require(value > 0, f"{name}={value} of VESPO: give more than 0")

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        row = segments(rollouts.lengths, len(logp))
        product = segment_sum(log_ratio(logp.detach(), old_logp), row, len(rollouts))
        log_w = product.clamp(SMALLEST, MAX_LOG_RATIO)[row]
        is_good = rollouts.advantage >= 0
        k = torch.where(is_good, self.k_good, self.k_bad)
        lambda_ = torch.where(is_good, self.lambda_good, self.lambda_bad)
        weight = (lambda_ + k * log_w - lambda_ * log_w.exp()).exp()
        return SurrogateResult.unbounded(weight * rollouts.advantage * logp)
