"""Surrogates: the per-token objective before the KL term, from log π_θ, log π_old and Â."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.prepared import Prepared
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import require


@dataclass(slots=True)
class SurrogateResult:
    """The objective of N tokens, and flags of tokens that are at a bound."""

    value: Tensor
    """[N] float32 objective to maximise, with gradient through log π_θ."""
    clipped_low: Tensor
    """[N] bool, True for a bad token (Â < 0) at its lower bound or beyond."""
    clipped_high: Tensor
    """[N] bool, True for a token at its upper bound or beyond."""
    unreachable: Tensor
    """[N] bool, True for a good token (Â > 0) whose upper bound lies beyond probability 1."""

    @classmethod
    def unbounded(cls, value: Tensor) -> "SurrogateResult":
        """Returns the result of a surrogate that sets no bounds."""
        never = torch.zeros_like(value, dtype=torch.bool)
        return cls(value, never, never, never)


class Surrogate(Prepared, ABC):
    """Computes the per-token objective. Gradient flows only through `logp`.

    A token whose Â is 0 has value and gradient 0, unless `moves_without_advantage`.
    """

    reads_old_logp: bool = False
    """True if `prepare` reads log π_old. If False, log π_old is not computed for a step with a single update."""
    moves_without_advantage: bool = False
    """True if a token whose Â is 0 may have a gradient, for example from a penalty. Its completion is then kept."""

    @abstractmethod
    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """Computes the objective of N tokens.

        Args:
            logp: [N] float32 log π_θ, with gradient.
            old_logp: [N] float32 log π_old.
            rollouts: The rollouts of the tokens, with Â and prepared columns.
        """


class Reinforce(Surrogate):
    """REINFORCE: Â log π_θ, without a ratio (Williams 1992).

    The plainest surrogate, for a single update per step: it has no bounds, so nothing limits it off policy.
    """

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        return SurrogateResult.unbounded(rollouts.advantage * logp)


class Clipped(Surrogate):
    """PPO and GRPO: min(ratio * Â, clip(ratio, 1 - clip_low, 1 + clip_high) * Â) (DeepSeekMath Eq. 3; CS336 Eq. 29).

    Makes several updates per step safe: a token has no gradient once its ratio is at the bound.

    Args:
        clip_low: ε below: a bad token gains nothing from a ratio under 1 - clip_low. None sets no bound.
        clip_high: ε above: a good token gains nothing from a ratio over 1 + clip_high. DAPO's clip-higher is 0.28. None
            sets no bound.
        dual_clip: c > 1. The value of a bad token is at least c * Â, so it has no gradient if its ratio is over c.
            3 in arXiv 1912.09729, Eq. 5. None sets no such bound.
    """

    def __init__(
        self, clip_low: float | None = 0.2, clip_high: float | None = 0.2, dual_clip: float | None = None
    ) -> None:
        self.low, self.high = bounds(clip_low, clip_high)
        self.dual_clip = math.inf if dual_clip is None else dual_clip
        require(self.dual_clip > 1, f"dual_clip={dual_clip}: give more than 1, e.g. 3, or null for no bound")

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        advantage = rollouts.advantage
        ratio = log_ratio(logp, old_logp).exp()
        result = clip(ratio, advantage, self.low, self.high, highest=-old_logp)
        if self.dual_clip < math.inf:
            result.value = torch.where(advantage < 0, result.value.maximum(self.dual_clip * advantage), result.value)
            result.clipped_high |= (ratio > self.dual_clip) & (advantage < 0)
        return result


def bounds(clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """Returns the lowest and the highest ratio, 1 - clip_low and 1 + clip_high; None sets no bound."""
    low = 0.0 if clip_low is None else 1 - clip_low
    high = math.inf if clip_high is None else 1 + clip_high
    require(0 <= low <= 1, f"clip_low={clip_low}: give a number from 0 to 1, or null for no bound")
    require(high >= 1, f"clip_high={clip_high}: give 0 or more, or null for no bound")
    return low, high


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float, highest: Tensor) -> SurrogateResult:
    """Computes PPO's pessimistic bound: the smaller of ratio * Â and clipped ratio * Â (CS336 Eq. 29 and 30).

    Args:
        ratio: [N] float32 π_θ/π_old, with gradient.
        advantage: [N] float32 Â.
        low: The lowest ratio.
        high: The highest ratio.
        highest: [N] float32, the largest possible log-ratio of each token, with π_θ at 1.
    """
    return SurrogateResult(
        value=torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage),
        clipped_low=(ratio < low) & (advantage < 0),
        clipped_high=(ratio > high) & (advantage > 0),
        unreachable=(highest < math.log(high)) & (advantage > 0),
    )
