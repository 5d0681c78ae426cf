"""Surrogates: the per-token objective to be maximised, before the KL term, from log π_θ, log π_old and Â."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.maths.ratio import log_ratio
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import UsageError


@dataclass(slots=True)
class SurrogateResult:
    """The objective of N tokens, and which of them are at a bound."""

    value: Tensor
    """[N] objective to maximise, with gradient through log π_θ."""
    clipped_low: Tensor
    """[N] bool: a bad token at its lower bound or beyond."""
    clipped_high: Tensor
    """[N] bool: a token at its upper bound or beyond."""
    unreachable: Tensor
    """[N] bool: a good token whose upper bound lies beyond probability 1, so it never gets there."""

    @classmethod
    def unbounded(cls, value: Tensor) -> "SurrogateResult":
        """The result of a surrogate that sets no bounds."""
        none = torch.zeros_like(value, dtype=torch.bool)
        return cls(value, none, none, none)


class Surrogate(ABC):
    """The per-token objective. Gradient flows through `logp` alone; a token whose Â is 0 has value and gradient 0."""

    reads_old_logp: bool = False
    """Whether `prepare` needs log π_old. If False, log π_old is not computed when a step has only one update."""

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Columns for `rollouts.columns`, computed once before the passes from whole groups; here none.

        Returns:
            A name and one float32 number per drawn token, [N], for each column. In `__call__`, `rollouts.columns` has
            them for the tokens of the pack. A pack of weight 0, which fills up a rank with less to do, has zeros.
        """
        return {}

    @abstractmethod
    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """The values of N tokens, from [N] log π_θ with gradient, [N] log π_old and their rollouts."""


class Reinforce(Surrogate):
    """REINFORCE: Â log π_θ, without a ratio (Williams 1992).

    The plainest one, for a single update per step: it has no bounds to tune, and none to hold it off policy.
    """

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] Â log π_θ."""
        return SurrogateResult.unbounded(rollouts.advantage * logp)


class Clipped(Surrogate):
    """PPO and GRPO: min(ratio * Â, clip(ratio, 1 - clip_low, 1 + clip_high) * Â) (DeepSeekMath Eq. 3; CS336 Eq. 29).

    Makes several updates per step safe: a token stops pushing once its ratio is at the bound.

    Args:
        clip_low: ε below: a bad token gains nothing from a ratio under 1 - clip_low. None sets no bound.
        clip_high: ε above: a good token gains nothing from a ratio over 1 + clip_high. DAPO's clip-higher is 0.28. None
            sets no bound.
        dual_clip: c > 1. The value of a bad token is at least c * Â, so it no longer pushes if its ratio is over c.
            3 in arXiv 1912.09729, Eq. 5. None sets no such bound.
    """

    def __init__(
        self, clip_low: float | None = 0.2, clip_high: float | None = 0.2, dual_clip: float | None = None
    ) -> None:
        self.low, self.high = bounds(clip_low, clip_high)
        if dual_clip is not None and not dual_clip > 1:
            raise UsageError(f"dual_clip={dual_clip}: give more than 1, e.g. 3, or null for no bound")
        self.dual_clip = math.inf if dual_clip is None else dual_clip

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] the smaller of the plain and the clipped objective."""
        advantage = rollouts.advantage
        ratio = log_ratio(logp, old_logp).exp()
        result = clip(ratio, advantage, self.low, self.high, highest=-old_logp)
        if self.dual_clip < math.inf:
            result.value = torch.where(advantage < 0, result.value.maximum(self.dual_clip * advantage), result.value)
            result.clipped_high |= (ratio > self.dual_clip) & (advantage < 0)
        return result


class CISPO(Surrogate):
    """CISPO: sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * Â * log π_θ (arXiv 2506.13585, Eq. 4-5).

    No token stops learning: the bounds only limit how hard it pushes. A clip silences rare but decisive tokens early.

    Args:
        clip_low: ε below; None, as in the paper, sets no bound.
        clip_high: ε above: the factor is at most 1 + clip_high. The paper gives no value; in ScaleRL (arXiv 2510.13786)
            the factor is at most 5.
    """

    def __init__(self, clip_low: float | None = None, clip_high: float | None = 4.0) -> None:
        self.low, self.high = bounds(clip_low, clip_high)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] clipped ratio, without gradient, times Â log π_θ."""
        ratio = log_ratio(logp.detach(), old_logp).exp()
        result = clip(ratio, rollouts.advantage, self.low, self.high, highest=-old_logp)
        result.value = ratio.clamp(self.low, self.high) * rollouts.advantage * logp
        return result


class SAPO(Surrogate):
    """SAPO: Â * sigmoid(τ (ratio - 1)) * 4/τ, a soft gate instead of a clip (arXiv 2511.20347, Eq. 5-6).

    The push of a token fades with the distance of its ratio from 1 instead of ending at a bound. At ratio 1 the
    gradient is that of `Clipped`.

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
        """[N] Â times the soft gate of the ratio."""
        ratio = log_ratio(logp, old_logp).exp()
        tau = torch.where(rollouts.advantage > 0, self.tau_good, self.tau_bad)
        return SurrogateResult.unbounded(rollouts.advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau)


def bounds(clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """Lowest and highest ratio: 1 - clip_low and 1 + clip_high; None sets no bound."""
    if clip_low is not None and not 0 <= clip_low <= 1:
        raise UsageError(f"clip_low={clip_low}: give a number from 0 to 1, or null for no bound")
    if clip_high is not None and not clip_high >= 0:
        raise UsageError(f"clip_high={clip_high}: give 0 or more, or null for no bound")
    return 0.0 if clip_low is None else 1 - clip_low, math.inf if clip_high is None else 1 + clip_high


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float, highest: Tensor) -> SurrogateResult:
    """The pessimistic bound of PPO: the smaller of ratio * Â and clipped ratio * Â (CS336 Eq. 29 and 30).

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
