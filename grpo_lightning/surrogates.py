"""Surrogates: the per-token objective to be maximised, before the KL term, from log π_θ, log π_old and Â."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.ragged import segment_mean, spread
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.types import UsageError

MAX_LOG_RATIO = 20.0


def log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """log(π/π_other), clamped to ±20: e^20 is beyond any use, and beyond it exp overflows."""
    return (logp - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(slots=True)
class SurrogateResult:
    """What a surrogate says of N tokens."""

    value: Tensor
    """[N] to be maximised, with gradient through log π_θ."""
    clipped_low: Tensor
    """[N] bool: a bad token at its lower bound, or beyond."""
    clipped_high: Tensor
    """[N] bool: a token at its upper bound, or beyond."""
    unreachable: Tensor
    """[N] bool: a good token whose upper bound lies beyond probability 1, so that it never gets there."""

    @classmethod
    def unbounded(cls, value: Tensor) -> "SurrogateResult":
        """The result of a surrogate that sets no bounds."""
        none = torch.zeros_like(value, dtype=torch.bool)
        return cls(value, none, none, none)


class Surrogate(ABC):
    """The per-token objective. Gradient flows through `logp` alone; a token whose Â is 0 has value and gradient 0."""

    reads_old_logp: bool = False
    """Whether `prepare` needs log π_old, which otherwise stays unknown where a step has a single update."""

    def prepare(self, rollouts: Rollouts) -> None:
        """Sees the rollouts once before the passes, every group whole, and may set `logp_low` and `logp_high`."""

    @abstractmethod
    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] log π_θ with gradient, [N] log π_old, and the rollouts they belong to -> [N] values."""


class Reinforce(Surrogate):
    """REINFORCE: Â log π_θ, without a ratio (Williams 1992)."""

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        return SurrogateResult.unbounded(rollouts.advantage * logp)


class Clipped(Surrogate):
    """PPO and GRPO: min(ratio * Â, clip(ratio, 1 - clip_low, 1 + clip_high) * Â) (DeepSeekMath Eq. 3; CS336 Eq. 29).

    Args:
        clip_low: ε below: the ratio of a bad token gains nothing under 1 - clip_low. None sets no bound.
        clip_high: ε above: the ratio of a good token gains nothing over 1 + clip_high. DAPO's clip-higher is 0.28.
            None sets no bound.
        dual_clip: c > 1: the value of a bad token is at least c * Â, so one whose ratio is over c no longer pushes
            (arXiv 1912.09729, Eq. 5; 3 there). None sets no such bound.
    """

    def __init__(
        self, clip_low: float | None = 0.2, clip_high: float | None = 0.2, dual_clip: float | None = None
    ) -> None:
        self.low, self.high = bounds(clip_low, clip_high)
        if dual_clip is not None and not dual_clip > 1:
            raise UsageError(f"dual_clip={dual_clip}: give more than 1, e.g. 3, or null for no bound")
        self.dual_clip = math.inf if dual_clip is None else dual_clip

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        advantage = rollouts.advantage
        ratio = log_ratio(logp, old_logp).exp()
        result = clip(ratio, advantage, self.low, self.high, highest=-old_logp)
        if self.dual_clip < math.inf:
            result.value = torch.where(advantage < 0, result.value.maximum(self.dual_clip * advantage), result.value)
            result.clipped_high |= (ratio > self.dual_clip) & (advantage < 0)
        return result


class SequenceClipped(Surrogate):
    """GSPO: `Clipped` with the ratio of the sequence, s_i = exp(mean over t of log(π_θ/π_old)), for each of its tokens.

    With `SequenceMean` this is arXiv 2507.18071, Eq. 5-7.

    Args:
        clip_low: ε below; s_i moves little, so the paper's is small. None sets no bound.
        clip_high: ε above. None sets no bound.
    """

    def __init__(self, clip_low: float | None = 3e-4, clip_high: float | None = 4e-4) -> None:
        self.low, self.high = bounds(clip_low, clip_high)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        ratio = spread(segment_mean(log_ratio(logp, old_logp), rollouts.lengths).exp(), rollouts.lengths)
        return self._clip(ratio, logp, old_logp, rollouts)

    def _clip(self, ratio: Tensor, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        highest = spread(segment_mean(-old_logp, rollouts.lengths), rollouts.lengths)
        return clip(ratio, rollouts.advantage, self.low, self.high, highest)


class SequenceClippedToken(SequenceClipped):
    """GSPO-token: the ratio's value is the sequence's, its gradient each token's own, so Â may differ by token.

    s_it = sg(s_i) π_θ / sg(π_θ) (arXiv 2507.18071, Eq. 13-14). The gradient is that of GSPO where Â is the same for all
    tokens.

    Args:
        clip_low: As of `SequenceClipped`.
        clip_high: As of `SequenceClipped`.
    """

    def _clip(self, ratio: Tensor, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        return super()._clip(ratio.detach() * (logp - logp.detach()).exp(), logp, old_logp, rollouts)


class CISPO(Surrogate):
    """CISPO: sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * Â * log π_θ (arXiv 2506.13585, Eq. 4-5).

    The bounds limit how hard a token pushes; none stops.

    Args:
        clip_low: ε below; None, as in the paper, sets no bound.
        clip_high: ε above: the factor is at most 1 + clip_high. The paper names none; ScaleRL (arXiv 2510.13786) takes
            5 in all.
    """

    def __init__(self, clip_low: float | None = None, clip_high: float | None = 4.0) -> None:
        self.low, self.high = bounds(clip_low, clip_high)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        ratio = log_ratio(logp.detach(), old_logp).exp()
        result = clip(ratio, rollouts.advantage, self.low, self.high, highest=-old_logp)
        result.value = ratio.clamp(self.low, self.high) * rollouts.advantage * logp
        return result


class SAPO(Surrogate):
    """SAPO: Â * sigmoid(τ (ratio - 1)) * 4/τ, a soft gate in the place of the clip (arXiv 2511.20347, Eq. 5-6).

    At ratio 1 the gradient is that of `Clipped`; the further away, the less a token pushes.

    Args:
        tau_good: τ where Â > 0.
        tau_bad: τ elsewhere; larger, so that bad tokens fade sooner.
    """

    def __init__(self, tau_good: float = 1.0, tau_bad: float = 1.05) -> None:
        for name, tau in (("tau_good", tau_good), ("tau_bad", tau_bad)):
            if not tau > 0:
                raise UsageError(f"{name}={tau}: give more than 0; the paper takes 1.0 and 1.05")
        self.tau_good = tau_good
        self.tau_bad = tau_bad

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        ratio = log_ratio(logp, old_logp).exp()
        tau = torch.where(rollouts.advantage > 0, self.tau_good, self.tau_bad)
        return SurrogateResult.unbounded(rollouts.advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau)


class GMPO(Surrogate):
    """GMPO: Â times the geometric mean of the sequence's clipped ratios (arXiv 2507.20673, Eq. 3-4).

    For good tokens exp(mean over t of min(log ratio, clip(log ratio))), for bad ones with max.

    Args:
        log_clip: The log-ratios are clipped to ± this; the paper takes 0.4, ratios from 0.67 to 1.49.
    """

    def __init__(self, log_clip: float = 0.4) -> None:
        if not log_clip > 0:
            raise UsageError(f"log_clip={log_clip}: give more than 0; the paper takes 0.4")
        self.log_clip = log_clip

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        advantage, lengths = rollouts.advantage, rollouts.lengths
        change = log_ratio(logp, old_logp)
        good, bad = (
            spread(segment_mean(bounded, lengths).exp(), lengths)
            for bounded in (change.clamp(max=self.log_clip), change.clamp(min=-self.log_clip))
        )
        return SurrogateResult(
            value=torch.where(advantage > 0, good, bad) * advantage,
            clipped_low=(change < -self.log_clip) & (advantage < 0),
            clipped_high=(change > self.log_clip) & (advantage > 0),
            unreachable=(-old_logp < self.log_clip) & (advantage > 0),
        )


class OffPolicyMask(Surrogate):
    """Leaves out bad completions that the policy has moved away from: mean over t of log(π_old/π_θ) above `threshold`.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556, Sec. 3.1); the KL term stays.

    Args:
        surrogate: The per-token objective of the others.
        threshold: δ, in nats a token.
    """

    def __init__(self, surrogate: Surrogate | None = None, threshold: float = 0.1) -> None:
        if not threshold >= 0:
            raise UsageError(f"threshold={threshold}: give 0 or more nats a token")
        self.surrogate = surrogate or Clipped()
        self.threshold = threshold
        self.reads_old_logp = self.surrogate.reads_old_logp

    def prepare(self, rollouts: Rollouts) -> None:
        self.surrogate.prepare(rollouts)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        result = self.surrogate(logp, old_logp, rollouts)
        away = spread(segment_mean(log_ratio(old_logp, logp.detach()), rollouts.lengths), rollouts.lengths)
        masked = (away > self.threshold) & (rollouts.advantage < 0)
        result.value = torch.where(masked, 0.0, result.value)
        # Not in place: a surrogate without bounds gives the same tensor for all three.
        result.clipped_low = result.clipped_low | masked
        result.clipped_high = result.clipped_high & ~masked
        return result


def bounds(clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """Lowest and highest ratio: 1 - clip_low and 1 + clip_high; None sets no bound."""
    if clip_low is not None and not 0 <= clip_low <= 1:
        raise UsageError(f"clip_low={clip_low}: give a number from 0 to 1, or null for no bound")
    if clip_high is not None and not clip_high >= 0:
        raise UsageError(f"clip_high={clip_high}: give 0 or more, or null for no bound")
    return 0.0 if clip_low is None else 1 - clip_low, math.inf if clip_high is None else 1 + clip_high


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float, highest: Tensor) -> SurrogateResult:
    """min(ratio * Â, clip(ratio, low, high) * Â), the pessimistic bound of PPO (CS336 Eq. 29 and 30).

    Args:
        ratio: [N] with gradient.
        advantage: [N].
        low: Smallest ratio that counts for a bad token.
        high: Largest ratio that counts for a good token.
        highest: [N] largest log-ratio there can be, with π_θ at 1.
    """
    return SurrogateResult(
        value=torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage),
        clipped_low=(ratio < low) & (advantage < 0),
        clipped_high=(ratio > high) & (advantage > 0),
        unreachable=(highest < math.log(high)) & (advantage > 0),
    )
