"""A weighting with a constant length."""

import torch
from torch import Tensor

from grpo_lightning.maths.weightings import BatchSize, TokenWeighting
from grpo_lightning.types import at_least


class FixedLength(TokenWeighting):
    """Dr. GRPO: 1 / (B L), with a constant L (arXiv 2503.20783).

    The length of a completion does not matter, so long wrong answers are not punished less per token.

    Args:
        length: L, in tokens. None is the longest completion allowed, `sampling.max_new_tokens`.
    """

    def __init__(self, length: int | None = None) -> None:
        at_least("length", length, 1, "FixedLength")
        self.length = length

    def __call__(self, lengths: Tensor, group: Tensor, batch: BatchSize) -> Tensor:
        length = batch.max_new_tokens if self.length is None else self.length
        assert length is not None, "give length, or a BatchSize with max_new_tokens"
        return torch.full_like(lengths, 1.0 / (batch.num_completions * length), dtype=torch.float32)
