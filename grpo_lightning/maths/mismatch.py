"""How far the sampler μ is from the policy π that learns from its completions, and what a correction does about it."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_lightning.maths.corrections import sequence_ratio
from grpo_lightning.maths.ragged import segment_sum, segments
from grpo_lightning.maths.ratio import log_ratio
from grpo_lightning.maths.rollouts import Rollouts

LONGEST = (16, 64, 256, 1024, 4096, 16384)
"""Completions of a class of length have at most as many drawn tokens, and more than those of the class before."""

CLASSES = (*map(str, LONGEST), "longer")
"""The names of the classes of length."""

CHANGED = 0.01
"""A factor that differs from 1 by more than this is a correction, not rounding."""

MEASURES = ("kl", "gap", "corrected", "masked", "ess")

FAR = 1.0
"""Nats; rounding alone hardly ever makes so large a difference."""


@dataclass(slots=True)
class Mismatch:
    """Sums by class of length, [len(CLASSES)] float32 each, so that packs and ranks add up. `gap` is a maximum.

    Tokens of weight 0 do not count, nor do completions of such tokens alone.
    """

    tokens: Tensor
    kl: Tensor
    """k3 of KL(μ || π): r - 1 - log r of a token, with r = π/μ. It is unbiased, since μ drew the tokens."""
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
    """The largest of a token."""

    @classmethod
    def from_pack(cls, rollouts: Rollouts, logp: Tensor, factor: Tensor | None) -> "Mismatch":
        """The numbers of one pack; zeros where nothing recorded log μ.

        Args:
            rollouts: Its tokens.
            logp: [N] log π, without gradient.
            factor: [N] what the correction multiplies the weight by; None: 1 throughout.
        """
        if rollouts.sampler_logp is None:
            return cls(*(torch.zeros(len(CLASSES), device=logp.device) for _ in fields(cls)))
        row = segments(rollouts.lengths, len(logp))
        # Bounds in a tensor would have to be uploaded.
        class_of_row = torch.stack([rollouts.lengths > longest for longest in LONGEST]).sum(0)
        class_of_token = class_of_row[row]
        counts = rollouts.weight != 0
        row_counts = segment_sum(counts.float(), row, len(rollouts)) > 0
        change = log_ratio(logp, rollouts.sampler_logp)
        ratio = sequence_ratio(change, rollouts)
        factor = torch.ones_like(change) if factor is None else factor

        def of_tokens(values: Tensor) -> Tensor:
            return segment_sum(torch.where(counts, values.float(), 0.0), class_of_token, len(CLASSES))

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
            gap=torch.zeros(len(CLASSES), device=logp.device).scatter_reduce_(0, class_of_token, gap, "amax"),
        )

    def __add__(self, other: "Mismatch") -> "Mismatch":
        """The numbers of both together."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Mismatch(**sums | {"gap": torch.maximum(self.gap, other.gap)})

    def reduce(self, reduce: Callable[..., Tensor]) -> "Mismatch":
        """The numbers of all ranks together, on the CPU; `reduce` is the strategy's, with `reduce_op` sum or max."""
        names = [f.name for f in fields(self) if f.name != "gap"]
        sums = reduce(torch.stack([getattr(self, name) for name in names]), reduce_op="sum")
        both = torch.cat([sums, reduce(self.gap.clone(), reduce_op="max")[None]]).cpu()
        return Mismatch(**dict(zip([*names, "gap"], both, strict=True)))

    def gaps(self) -> tuple[float, float]:
        """Mean |log π - log μ| per token in nats, and the fraction of tokens for which it is more than `FAR`."""
        mean, far = torch.stack([self.off.sum(), self.far.sum()]) / self.tokens.sum().clamp(min=1)
        return float(mean), float(far)

    def metrics(self) -> dict[str, Tensor]:
        """The numbers to log, by name: of all completions, and of each class of length that has any."""
        if not self.tokens.any():
            return {}
        whole = Mismatch(**{f.name: getattr(self, f.name).sum() for f in fields(self)} | {"gap": self.gap.max()})
        found = {f"mismatch/{name}": value for name, value in whole._measures().items()}
        by_class = self._measures()
        for index in self.tokens.nonzero().flatten().tolist():
            found |= {f"mismatch/{name}/{CLASSES[index]}": value[index] for name, value in by_class.items()}
        return found

    def _measures(self) -> dict[str, Tensor]:
        """Each number that is logged, for all classes at once."""
        return {
            "kl": self.kl / self.tokens,
            "gap": self.gap,
            "corrected": self.corrected / self.tokens,
            "masked": self.masked / self.tokens,
            # Kish's: as many completions of equal weight would spread the mean as much.
            "ess": self.ratio.square() / (self.completions * self.squared_ratio),
        }
