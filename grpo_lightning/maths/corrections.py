"""Corrections: a factor per token for completions that another policy drew than the one that learns from them.

μ is the policy that drew the tokens, as the engine recorded it; π_old the policy at the start of the step. They differ
where the sampler rounds differently or has older weights. In all formulas r_t = π_old(o_t)/μ(o_t), with |log r_t| at
most 20, and r_i is the product of the r_t of completion i.

The factor multiplies the token's weight in the objective. With the ratio π_θ/π_old of the surrogate it makes decoupled
PPO: π_θ/π_old is clipped, π_old/μ corrects (Hilton, Cobbe & Schulman, arXiv 2110.00641; AReaL, arXiv 2505.24298).

Defaults of others are those of TRL 1.16 (`vllm_importance_sampling_mode`), verl of 22 August 2026
(`algorithm.rollout_correction`), prime-rl of 21 August 2026 and SkyRL of the same day.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import segment_mean, segment_sum, segments
from grpo_lightning.maths.ratio import MAX_LOG_RATIO
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import UsageError


class Correction(ABC):
    """The factor of each token. It has no gradient, and depends on the token's own completion alone."""

    reads_sampler: bool = True
    """Whether it needs the log-probs that the engine recorded. If False it is never called, and every factor is 1."""

    @abstractmethod
    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] float32 factors, 0 for tokens that are left out.

        Args:
            log_ratio: [N] log(π_old/μ), at most ±20, without gradient.
            rollouts: The tokens, with `sampler_logp` and `advantage`; rows are whole.
        """


class NoCorrection(Correction):
    """1: the sampler is taken for the policy. Right where its log-probs are the policy's own, as in float32."""

    reads_sampler = False

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] ones."""
        return torch.ones_like(log_ratio)


class TruncatedRatio(Correction):
    """TIS, truncated importance sampling: min(r_t, cap).

    The usual choice: every token still counts, and none counts more than `cap` times. Ionides 2008; for samplers that
    round differently Yao et al. 2025 (fengyao.notion.site/off-policy-rl).
    TRL: `token_truncate`, 3. verl: `rollout_is: token`, 2 (off by default). SkyRL: 2, with `GeometricMask`.

    Args:
        cap: C, the largest factor.
    """

    def __init__(self, cap: float = 2.0) -> None:
        if not cap >= 1:
            raise UsageError(
                f"cap={cap} of TruncatedRatio: give 1 or more, which is the factor without mismatch; e.g. 2"
            )
        self.cap = cap

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] the ratio, at most `cap`."""
        return log_ratio.exp().clamp(max=self.cap)


class RatioMask(Correction):
    """IcePop: r_t if low <= r_t <= high, else 0.

    Leaves single tokens out on which sampler and policy disagree most, as mixtures of experts have them (Ring-1T,
    arXiv 2510.18855). TRL: `token_mask`, up to 3. verl: `rollout_is_threshold: "0.5_5.0"`.

    Args:
        low: α, the smallest ratio that counts.
        high: β, the largest ratio that counts.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        self.low, self.high = around_one(low, high, "RatioMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] the ratio, 0 outside the bounds."""
        return kept(log_ratio.exp(), self.low, self.high)


class SequenceMask(Correction):
    """MIS, masked importance sampling of whole completions: r_i if low <= r_i <= high, else 0, for each token of i.

    r_i weighs a completion without bias, but spreads with its length: of long ones few stay (Liu et al. 2025,
    richardli.xyz/rl-collapse). TRL: the default, `sequence_mask`, up to 3. verl: `rollout_is: sequence`, truncated
    at 2.

    Args:
        low: The smallest ratio that counts; 0 sets no bound.
        high: The largest ratio that counts.
    """

    def __init__(self, low: float = 0.0, high: float = 3.0) -> None:
        self.low, self.high = around_one(low, high, "SequenceMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] the ratio of the completion, 0 outside the bounds."""
        return rollouts.spread(kept(sequence_ratio(log_ratio, rollouts), self.low, self.high))


class GeometricMask(Correction):
    """1 if low <= exp(mean over t of log r_t) <= high, else 0, for each token of the completion.

    A bound on the mismatch per token, so that long completions are not left out for their length alone. It chooses and
    does not weigh: the factor inside is 1 (Liu et al. 2025, richardli.xyz/rl-collapse-3).
    verl: `rollout_rs: seq_mean_k1`, off by default. SkyRL: 0.99 to 1.01.

    Args:
        low: The smallest mean ratio that counts. The default is for a sampler that only rounds; old weights need more.
        high: The largest mean ratio that counts.
    """

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        self.low, self.high = around_one(low, high, "GeometricMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] 1 or 0."""
        ratio = segment_mean(log_ratio, rollouts.lengths).exp()
        return rollouts.spread((kept(ratio, self.low, self.high) > 0).float())


class ProbabilityGap(Correction):
    """DPPO: r_t, but 0 where the policy has already moved too far the way that Â pushes.

    That is π_old - μ > threshold where Â > 0, and π_old - μ < -threshold where Â < 0. A difference bounds likely tokens
    as tightly as unlikely ones, which a ratio does not (binary total variation, arXiv 2602.04879).
    prime-rl: the default, 0.2 on both sides; it measures π_θ - μ, which differs after the first update of a step.

    Args:
        threshold: δ, the largest difference of probabilities.
    """

    def __init__(self, threshold: float = 0.2) -> None:
        if not 0 < threshold <= 1:
            raise UsageError(f"threshold={threshold} of ProbabilityGap: give more than 0 and at most 1; e.g. 0.2")
        self.threshold = threshold

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] the ratio, 0 beyond the threshold."""
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
    if not 0 <= low <= 1 <= high < math.inf:
        raise UsageError(f"low={low}, high={high} of {owner}: give 0 <= low <= 1 <= high, since 1 is no mismatch")
    return low, high
