"""Corrections: a factor per token for completions that were sampled from another policy than the one that learns.

The sampler is the policy μ that sampled the tokens; π_old is the policy at the start of the step. They differ if the
sampler rounds differently or has older weights. In all formulas r_t = π_old(o_t)/μ(o_t), with |log r_t| at most 20, and
r_i is the product of r_t over completion i. Together with the ratio of the surrogate this is decoupled PPO: π_θ/π_old
is clipped, and π_old/μ corrects (arXiv 2110.00641; AReaL, arXiv 2505.24298). docs/reference/methods.md has the
names that TRL and verl use.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from grpo_lightning.maths.kl import MAX_LOG_RATIO
from grpo_lightning.maths.prepared import Prepared
from grpo_lightning.maths.ragged import segment_sum, segments
from grpo_lightning.maths.rollouts import Rollouts


class Correction(Prepared, ABC):
    """Computes a factor for each token.

    A factor has no gradient. It depends only on the token's completion and on prepared columns.
    """

    reads_sampler: bool = True
    """True if it reads the log-probs that the engine recorded. If False it is never called, and every factor is 1."""
    reads_old_logp: bool = False
    """True if `prepare` needs log π_old."""

    @abstractmethod
    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] float32 factors, 0 for tokens that are left out.

        Args:
            log_ratio: [N] float32 log(π_old/μ), clamped to ±20.
            rollouts: The rows of the tokens, complete.
        """


class NoCorrection(Correction):
    """Applies no correction (factor 1): right if sampler and policy have the same log-probs, as in float32."""

    reads_sampler = False

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return torch.ones_like(log_ratio)


def sequence_ratio(log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """[B] r_i, the product of each row's ratios, from [N] log r_t; log r_i is clamped to ±20."""
    row = segments(rollouts.lengths, len(log_ratio))
    return segment_sum(log_ratio, row, len(rollouts)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
