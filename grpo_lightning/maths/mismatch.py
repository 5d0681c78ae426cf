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

LONGEST = (16, 64, 256, 1024, 4096, 16384)  # the most drawn tokens of a completion in each class of length
CLASSES = (*map(str, LONGEST), "longer")
CHANGED = 0.01  # a factor that differs from 1 by more is a correction, not rounding
FAR = 1.0  # nats; rounding alone hardly ever makes so large a difference


@dataclass
class Mismatch(Sums):
    """Sums by class of length, [len(CLASSES)] float32 each; tokens of weight 0 and completions of such do not count."""

    tokens: Tensor
    kl: Tensor  # k3 of KL(μ || π): r - 1 - log r of a token, with r = π/μ; unbiased, since μ drew the tokens
    corrected: Tensor  # tokens whose factor differs from 1 by more than `CHANGED`
    masked: Tensor  # tokens whose factor is 0
    completions: Tensor
    ratio: Tensor  # π/μ of whole completions
    squared_ratio: Tensor
    off: Tensor  # |log π - log μ| of a token, in nats
    far: Tensor  # tokens for which it is more than `FAR`
    gap: Tensor  # the largest |log π - log μ| of a token

    @classmethod
    def from_pack(cls, rollouts: Rollouts, logp: Tensor, factor: Tensor) -> "Mismatch":
        """The numbers of one pack from [N] log π and the [N] factor of its correction; zeros without log μ."""
        if rollouts.sampler_logp is None:
            return cls(*(torch.zeros(len(CLASSES), device=logp.device) for _ in fields(cls)))
        row = segments(rollouts.lengths, len(logp))
        # Bounds in a tensor would have to be uploaded.
        class_of_row = torch.stack([rollouts.lengths > longest for longest in LONGEST]).sum(0)
        counts = rollouts.weight != 0
        row_counts = segment_sum(counts.float(), row, len(rollouts)) > 0
        change = log_ratio(logp, rollouts.sampler_logp)
        ratio = sequence_ratio(change, rollouts)

        def of_tokens(values: Tensor) -> Tensor:
            return segment_sum(torch.where(counts, values.float(), 0.0), class_of_row[row], len(CLASSES))

        def of_rows(values: Tensor) -> Tensor:
            return segment_sum(torch.where(row_counts, values, 0.0), class_of_row, len(CLASSES))

        gap = torch.where(counts, (logp - rollouts.sampler_logp).abs(), 0.0)
        return cls(
            tokens=of_tokens(counts),
            kl=of_tokens(change.expm1() - change),
            corrected=of_tokens((factor - 1).abs() > CHANGED),
            masked=of_tokens(factor == 0),
            completions=of_rows(torch.ones_like(ratio)),
            ratio=of_rows(ratio),
            squared_ratio=of_rows(ratio.square()),
            off=of_tokens(gap),
            far=of_tokens(gap > FAR),
            gap=torch.zeros(len(CLASSES), device=logp.device).scatter_reduce_(0, class_of_row[row], gap, "amax"),
        )

    def reduce(self, reduce: Callable[..., Tensor]) -> Self:
        """The numbers of all ranks together, on the CPU."""
        return super().reduce(reduce).on_host()[0]

    def gaps(self) -> tuple[float, float]:
        """Mean |log π - log μ| per token in nats, and the fraction of tokens for which it is more than `FAR`."""
        mean, far = torch.stack([self.off.sum(), self.far.sum()]) / self.tokens.sum().clamp(min=1)
        return float(mean), float(far)

    def metrics(self) -> dict[str, Tensor]:
        """The numbers to log, by name: of all completions, and of each class of length that has any."""
        wholes = [*(one.sum() for one in self.numbers[:-1]), self.gap.max()]
        rows = Mismatch(*(torch.cat([whole[None], each]) for whole, each in zip(wholes, self.numbers, strict=True)))
        by_row = {
            "kl": rows.kl / rows.tokens,
            "gap": rows.gap,
            "corrected": rows.corrected / rows.tokens,
            "masked": rows.masked / rows.tokens,
            # Kish's: as many completions of equal weight would spread the mean as much.
            "ess": rows.ratio.square() / (rows.completions * rows.squared_ratio),
        }
        names = ["", *(f"/{name}" for name in CLASSES)]
        present = rows.tokens.nonzero().flatten().tolist()
        return {f"mismatch/{name}{names[row]}": value[row] for row in present for name, value in by_row.items()}
