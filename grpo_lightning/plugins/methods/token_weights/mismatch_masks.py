"""Corrections that leave out tokens or completions on which sampler and policy disagree.

The notation is explained in `maths/corrections.py`.
"""

import math

import torch
from torch import Tensor

from grpo_lightning.maths.corrections import Correction, sequence_ratio
from grpo_lightning.maths.ragged import segment_mean
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import UsageError, require


class RatioMask(Correction):
    """IcePop: r_t if low <= r_t <= high, else 0.

    Leaves out single tokens on which sampler and policy disagree most, as happens in mixtures of experts (Ring-1T,
    arXiv 2510.18855).

    Args:
        low: α, the smallest ratio that counts.
        high: β, the largest ratio that counts.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        self.low, self.high = around_one(low, high, "RatioMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return inside(log_ratio.exp(), self.low, self.high)


class SequenceMask(Correction):
    """MIS, masked importance sampling of whole completions: r_i if low <= r_i <= high, else 0, for each token of i.

    r_i weighs a completion without bias, but varies more the longer it is: few long completions stay (Liu et al. 2025,
    richardli.xyz/rl-collapse). TRL's default, up to 3.

    Args:
        low: The smallest ratio that counts; 0 sets no bound.
        high: The largest ratio that counts.
    """

    def __init__(self, low: float = 0.0, high: float = 3.0) -> None:
        self.low, self.high = around_one(low, high, "SequenceMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return rollouts.per_token(inside(sequence_ratio(log_ratio, rollouts), self.low, self.high))


class GeometricMask(Correction):
    """Gives 1 if low <= exp(mean over t of log r_t) <= high, else 0, for each token of the completion.

    It bounds the mismatch per token, so that long completions are not left out for their length alone. It selects
    completions without weighing them: between the bounds the factor is 1 (Liu et al. 2025,
    richardli.xyz/rl-collapse-3).

    Args:
        low: The smallest mean ratio that counts. The default is for a sampler that only rounds; old weights need more.
        high: The largest mean ratio that counts.
    """

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        self.low, self.high = around_one(low, high, "GeometricMask")

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        ratio = segment_mean(log_ratio, rollouts.lengths).exp()
        return rollouts.per_token((inside(ratio, self.low, self.high) > 0).float())


class ProbabilityGap(Correction):
    """DPPO's mask before the passes: r_t, but 0 if the policy has already moved too far in the direction of Â.

    Too far is π_old - μ > threshold where Â > 0, and π_old - μ < -threshold where Â < 0 (binary total variation,
    arXiv 2602.04879). The mask is computed once per step: it leaves out stale tokens, and does not bound π_θ - π_old,
    the change by the updates of the step. The surrogate `DPPO` bounds this change too.

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


def inside(ratio: Tensor, low: float, high: float) -> Tensor:
    """[n] the ratios from `low` to `high`, and 0 in place of other ratios. NaN stays NaN."""
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


def around_one(low: float, high: float, owner: str) -> tuple[float, float]:
    """Returns the bounds of a ratio. Raises UsageError unless 1, the ratio without mismatch, lies between them."""
    if not 0 <= low <= 1 <= high < math.inf:
        raise UsageError(f"low={low}, high={high} of {owner}: give 0 <= low <= 1 <= high, since 1 is no mismatch")
    return low, high
