"""Surrogates: the per-token objective to be maximised, before the KL term, from log π_θ, log π_old and Â."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """[N] bool: held at the lower bound, so the token no longer pushes."""
    clipped_high: Tensor
    """[N] bool: held at the upper bound, so the token no longer pushes."""


class Surrogate(ABC):
    """The per-token objective. Gradient flows through `logp` alone."""

    @abstractmethod
    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] log π_θ with gradient, [N] log π_old, and the rollouts they belong to -> [N] values."""


class Clipped(Surrogate):
    """PPO and GRPO: min(ratio * Â, clip(ratio, 1 - clip_low, 1 + clip_high) * Â) (DeepSeekMath Eq. 3; CS336 Eq. 29).

    Args:
        clip_low: ε below: the ratio of a bad token gains nothing under 1 - clip_low.
        clip_high: ε above: the ratio of a good token gains nothing over 1 + clip_high. DAPO's clip-higher is 0.28.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        if not 0 <= clip_low <= 1:
            raise UsageError(f"clip_low={clip_low}: give a number from 0 to 1")
        if clip_high < 0:
            raise UsageError(f"clip_high={clip_high}: give 0 or more")
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        advantage = rollouts.advantage
        ratio = log_ratio(logp, old_logp).exp()
        low, high = 1 - self.clip_low, 1 + self.clip_high
        return SurrogateResult(
            value=torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage),
            clipped_low=(ratio < low) & (advantage < 0),
            clipped_high=(ratio > high) & (advantage > 0),
        )
