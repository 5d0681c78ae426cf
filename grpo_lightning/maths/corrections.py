"""Corrections: a factor per token for completions that another policy drew than the one that learns from them.

μ drew the tokens; π_old is the policy at the start of the step. They differ where the sampler rounds differently or has
older weights. In all formulas r_t = π_old(o_t)/μ(o_t), with |log r_t| at most 20, and r_i is the product of the r_t of
completion i. With the ratio of the surrogate this makes decoupled PPO: π_θ/π_old is clipped, π_old/μ corrects
(arXiv 2110.00641; AReaL, arXiv 2505.24298). docs/algorithms.md has the names that TRL and verl use.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from grpo_lightning.maths.kl import MAX_LOG_RATIO
from grpo_lightning.maths.prepared import Prepared
from grpo_lightning.maths.ragged import segment_sum, segments
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import at_least


class Correction(Prepared, ABC):
    """The factor of each token. It has no gradient, and depends on its own completion and on prepared columns alone."""

    reads_sampler: bool = True
    """True if it needs the log-probs that the engine recorded. If False it is never called, and every factor is 1."""
    reads_old_logp: bool = False
    """True if `prepare` needs log π_old."""

    @abstractmethod
    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] float32 factors, 0 for tokens that are left out, from [N] log(π_old/μ) and rollouts of whole rows."""


class NoCorrection(Correction):
    """1: the sampler is taken for the policy. Right where its log-probs are the policy's own, as in float32."""

    reads_sampler = False

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return torch.ones_like(log_ratio)


class TruncatedRatio(Correction):
    """TIS, truncated importance sampling: min(r_t, cap).

    The usual choice: every token still counts, and none counts more than `cap` times. Ionides 2008; for samplers that
    round differently Yao et al. 2025 (fengyao.notion.site/off-policy-rl). TRL takes 3, verl and SkyRL 2.

    Args:
        cap: C, the largest factor.
    """

    def __init__(self, cap: float = 2.0) -> None:
        at_least("cap", cap, 1, "TruncatedRatio")
        self.cap = cap

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return log_ratio.exp().clamp(max=self.cap)


def sequence_ratio(log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """[B] r_i, the product of each completion's ratios, from [N] log r_t; its logarithm is at most ±20."""
    row = segments(rollouts.lengths, len(log_ratio))
    return segment_sum(log_ratio, row, len(rollouts)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
