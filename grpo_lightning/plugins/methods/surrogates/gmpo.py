"""GMPO: the geometric mean of a sequence's clipped ratios."""

import torch
from torch import Tensor

from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.ragged import segment_mean
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import require


class GMPO(Surrogate):
    """GMPO: Â times the geometric mean of the sequence's clipped ratios (arXiv 2507.20673, Eq. 3-4).

    Single extreme ratios change a geometric mean less, so wider bounds are safe. The value is
    exp(mean over t of min(log ratio, clip(log ratio))) for good tokens; for bad ones max replaces min.

    Args:
        log_clip: Largest absolute log-ratio; the paper takes 0.4, which are ratios from 0.67 to 1.49.
    """

    def __init__(self, log_clip: float = 0.4) -> None:
        require(log_clip > 0, f"log_clip={log_clip}: give more than 0; the paper takes 0.4")
        self.log_clip = log_clip

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        advantage = rollouts.advantage
        change = log_ratio(logp, old_logp)
        good_ratio, bad_ratio = (
            rollouts.per_token(segment_mean(bounded, rollouts.lengths).exp())
            for bounded in (change.clamp(max=self.log_clip), change.clamp(min=-self.log_clip))
        )
        return SurrogateResult(
            value=torch.where(advantage > 0, good_ratio, bad_ratio) * advantage,
            clipped_low=(change < -self.log_clip) & (advantage < 0),
            clipped_high=(change > self.log_clip) & (advantage > 0),
            unreachable=(-old_logp < self.log_clip) & (advantage > 0),
        )
