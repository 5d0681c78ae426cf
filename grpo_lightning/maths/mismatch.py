"""The mismatch of the sampler μ and the policy π that learns from its completions, and the effect of a correction."""

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

CHANGED = 0.01  # a factor that differs from 1 by more is a correction, not rounding
FAR = 1.0  # nats; rounding alone hardly ever makes so large a difference


@dataclass
class Mismatch(Sums):
    """Sums over tokens and completions. Tokens with zero weight, and completions without others, are ignored."""

    tokens: Tensor
    kl: Tensor
    """K3 of KL(μ || π): r - 1 - log r of a token, with r = π/μ; unbiased, since μ drew the tokens."""
    corrected: Tensor
    """Tokens whose factor differs from 1 by more than `CHANGED`."""
    masked: Tensor
    """Tokens whose factor is 0."""
    completions: Tensor
    ratio: Tensor
    """π/μ of whole completions."""
    squared_ratio: Tensor
    off: Tensor
    """|log π - log μ| of a token, in nats."""
    far: Tensor
    """Tokens for which it is more than `FAR`."""
    gap: Tensor
    """The largest |log π - log μ| of a token."""

    @classmethod
    def from_micro_batch(cls, rollouts: Rollouts, logp: Tensor, factor: Tensor) -> "Mismatch":
        """The numbers of one micro-batch from [N] log π and the [N] factor of its correction; zeros without log μ."""
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
        """The numbers of all ranks together, on the CPU."""
        return super().reduce(reduce).on_host()[0]

    def gaps(self) -> tuple[float, float]:
        """Mean |log π - log μ| per token in nats, and the fraction of tokens for which it is more than `FAR`."""
        mean, far = torch.stack([self.off, self.far]) / self.tokens.clamp(min=1)
        return float(mean), float(far)

    def metrics(self) -> dict[str, Tensor]:
        """The numbers to log, by name; none where no token counts."""
        metrics = {
            "mismatch/kl": self.kl / self.tokens,
            "mismatch/gap": self.gap,
            "mismatch/corrected": self.corrected / self.tokens,
            "mismatch/masked": self.masked / self.tokens,
            # Kish's: as many completions of equal weight would spread the mean as much.
            "mismatch/ess": self.ratio.square() / (self.completions * self.squared_ratio),
        }
        return metrics if self.tokens > 0 else {}
