"""The mismatch between the sampler μ and the policy π that learns from its completions; the effect of a correction."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from grpo_lightning.maths.corrections import sequence_ratio
from grpo_lightning.maths.diagnostics import Sums
from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.ragged import segment_sum, segments
from grpo_lightning.maths.rollouts import Rollouts

CHANGED = 0.01
"""A factor that differs from 1 by more is a correction, not rounding."""
FAR = 1.0
"""Gap of a token, in nats, that rounding alone hardly ever makes."""


@dataclass
class Mismatch(Sums):
    """Sums over tokens and completions. Tokens with zero weight, and completions without other tokens, are ignored.

    Each is a float32 scalar.
    """

    tokens: Tensor
    """The number of tokens."""
    kl: Tensor
    """The sum of k3 of KL(μ || π) over tokens: r - 1 - log r with r = π/μ; unbiased, since μ sampled the tokens."""
    corrected: Tensor
    """The number of tokens whose factor differs from 1 by more than `CHANGED`."""
    masked: Tensor
    """The number of tokens whose factor is 0."""
    completions: Tensor
    """The number of completions."""
    ratio: Tensor
    """The sum of π/μ of whole completions."""
    squared_ratio: Tensor
    """The sum of the squares of π/μ of whole completions."""
    off: Tensor
    """The sum of |log π - log μ| over tokens, in nats."""
    far: Tensor
    """The number of tokens with |log π - log μ| above `FAR`."""
    gap: Tensor
    """The largest |log π - log μ| of a token, in nats."""

    @classmethod
    def from_micro_batch(cls, rollouts: Rollouts, logp: Tensor, factor: Tensor) -> "Mismatch":
        """Sums the numbers of one micro-batch; zeros if log μ is unknown.

        Args:
            rollouts: The rollouts of the micro-batch.
            logp: [N] float32 log π.
            factor: [N] float32 factors of the correction.
        """
        if rollouts.sampler_logp is None:
            return cls(*(torch.zeros((), device=logp.device) for _ in fields(cls)))
        counts = rollouts.weight != 0
        row_counts = segment_sum(counts.float(), segments(rollouts.lengths, len(logp)), len(rollouts)) > 0
        change = log_ratio(logp, rollouts.sampler_logp)
        ratio = sequence_ratio(change, rollouts)
        gap = torch.where(counts, (logp - rollouts.sampler_logp).abs(), 0.0)

        def total(values: Tensor, mask: Tensor = counts) -> Tensor:
            return torch.where(mask, values.float(), 0.0).sum()

        return cls(
            tokens=total(counts),
            kl=total(change.expm1() - change),
            corrected=total((factor - 1).abs() > CHANGED),
            masked=total(factor == 0),
            completions=total(row_counts, row_counts),
            ratio=total(ratio, row_counts),
            squared_ratio=total(ratio.square(), row_counts),
            off=gap.sum(),
            far=total(gap > FAR),
            gap=gap.max(),
        )

    def reduce(self, reduce: Callable[..., Tensor]) -> Self:
        """Adds up the numbers of all ranks, and copies them to the CPU."""
        return super().reduce(reduce).on_host()[0]

    def gaps(self) -> tuple[float, float]:
        """Returns the mean |log π - log μ| per token in nats, and the fraction of tokens where it is above `FAR`."""
        mean_gap, far_fraction = torch.stack([self.off, self.far]) / self.tokens.clamp(min=1)
        return float(mean_gap), float(far_fraction)

    def metrics(self) -> dict[str, Tensor]:
        """Returns metrics by name; none if no token counts."""
        metrics = {
            "mismatch/kl": self.kl / self.tokens,
            "mismatch/gap": self.gap,
            "mismatch/corrected": self.corrected / self.tokens,
            "mismatch/masked": self.masked / self.tokens,
            # Kish's effective sample size: a mean of so many completions of equal weight would vary as much.
            "mismatch/ess": self.ratio.square() / (self.completions * self.squared_ratio),
        }
        return metrics if self.tokens > 0 else {}
