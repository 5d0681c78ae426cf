"""Corrections: a factor per token for completions that another policy drew than the one that learns from them.

μ drew the tokens; π_old is the policy at the start of the step. They differ where the sampler rounds differently or has
older weights. In all formulas r_t = π_old(o_t)/μ(o_t), with |log r_t| at most 20, and r_i is the product of the r_t of
completion i. With the ratio of the surrogate this makes decoupled PPO: π_θ/π_old is clipped, π_old/μ corrects
(arXiv 2110.00641; AReaL, arXiv 2505.24298). docs/algorithms.md has the names that TRL and verl use.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from grpo_lightning.maths.kl import MAX_LOG_RATIO
from grpo_lightning.maths.prepared import Prepared
from grpo_lightning.maths.ragged import segment_mean, segment_sum, segments
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import at_least, require


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


class RatioMask(Correction):
    """IcePop: r_t if low <= r_t <= high, else 0.

    Leaves single tokens out on which sampler and policy disagree most, as mixtures of experts have them (Ring-1T,
    arXiv 2510.18855).

    Args:
        low: α, the smallest ratio that counts.
        high: β, the largest ratio that counts.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        self.low, self.high = around_one(low, high, "RatioMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return kept(log_ratio.exp(), self.low, self.high)


class SequenceMask(Correction):
    """MIS, masked importance sampling of whole completions: r_i if low <= r_i <= high, else 0, for each token of i.

    r_i weighs a completion without bias, but spreads with its length: of long ones few stay (Liu et al. 2025,
    richardli.xyz/rl-collapse). TRL's default, up to 3.

    Args:
        low: The smallest ratio that counts; 0 sets no bound.
        high: The largest ratio that counts.
    """

    def __init__(self, low: float = 0.0, high: float = 3.0) -> None:
        self.low, self.high = around_one(low, high, "SequenceMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return rollouts.spread(kept(sequence_ratio(log_ratio, rollouts), self.low, self.high))


class GeometricMask(Correction):
    """1 if low <= exp(mean over t of log r_t) <= high, else 0, for each token of the completion.

    A bound on the mismatch per token, so that long completions are not left out for their length alone. It chooses and
    does not weigh: the factor inside is 1 (Liu et al. 2025, richardli.xyz/rl-collapse-3).

    Args:
        low: The smallest mean ratio that counts. The default is for a sampler that only rounds; old weights need more.
        high: The largest mean ratio that counts.
    """

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        self.low, self.high = around_one(low, high, "GeometricMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        ratio = segment_mean(log_ratio, rollouts.lengths).exp()
        return rollouts.spread((kept(ratio, self.low, self.high) > 0).float())


class ProbabilityGap(Correction):
    """DPPO's mask before the passes: r_t, but 0 where the policy has already moved too far the way that Â pushes.

    That is π_old - μ > threshold where Â > 0, and π_old - μ < -threshold where Â < 0 (binary total variation,
    arXiv 2602.04879). It is decided once per step: it leaves out stale tokens, and does not bound what the updates of a
    step do, which is π_θ - π_old. The surrogate `DPPO` bounds those too.

    Args:
        threshold: δ, the largest difference of probabilities.
    """

    def __init__(self, threshold: float = 0.2) -> None:
        require(0 < threshold <= 1, f"threshold={threshold} of ProbabilityGap: give more than 0, at most 1")
        self.threshold = threshold

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        assert rollouts.sampler_logp is not None
        ratio = log_ratio.exp()
        gap = rollouts.sampler_logp.exp() * (ratio - 1)
        return torch.where(gap * rollouts.advantage.sign() > self.threshold, 0.0, ratio)


def sequence_ratio(log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """[B] r_i, the product of each completion's ratios, from [N] log r_t; its logarithm is at most ±20."""
    row = segments(rollouts.lengths, len(log_ratio))
    return segment_sum(log_ratio, row, len(rollouts)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kept(ratio: Tensor, low: float, high: float) -> Tensor:
    """The ratios from `low` to `high`, 0 for others. A NaN stays one."""
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


def around_one(low: float, high: float, owner: str) -> tuple[float, float]:
    """The bounds of a ratio. Raises UsageError unless 1, the ratio without mismatch, lies between them."""
    fix = "give 0 <= low <= 1 <= high, since 1 is no mismatch"
    require(0 <= low <= 1 <= high < math.inf, f"low={low}, high={high} of {owner}: {fix}")
    return low, high
