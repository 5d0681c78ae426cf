"""Prompts and completions row by row: one sequence per completion, padded on the right to the longest."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths import ragged
from grpo_lightning.maths.rollouts import Rollouts


@dataclass(slots=True)
class PaddedRows:
    """Positions of all tokens in [B, T - 1], T the longest sequence: its last token predicts nothing.

    With causal attention no token sees the padding behind it. So no mask is needed, and the model's own positions are
    right.
    """

    tokens: Tensor
    """[B, T - 1] index of each token in `Rollouts.all_token_ids`; 0 for padding."""
    predicts: Tensor
    """[N] index, in the flattened rows, of the token after which each drawn token was drawn."""

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "PaddedRows":
        """Lays out the prompts and completions of `rollouts`. The work is done on the host."""
        sizes, device = rollouts.sizes, rollouts.token_ids.device
        prompt_lengths, lengths = sizes.prompt_lengths[sizes.group], sizes.completion_lengths
        width = int(sizes.sequence_lengths.max()) - 1
        index = torch.zeros(len(prompt_lengths), width + 1, dtype=torch.int64)
        prompt_tokens = ragged.take(sizes.group, sizes.prompt_lengths)
        index[ragged.segments(prompt_lengths), ragged.positions(prompt_lengths)] = prompt_tokens
        row = ragged.segments(lengths)
        position = ragged.spread(prompt_lengths, lengths) + ragged.positions(lengths)
        index[row, position] = int(sizes.prompt_lengths.sum()) + sizes.order
        before = (row * width + position - 1)[sizes.drawn]
        return cls(tokens=index[:, :-1].to(device), predicts=before.to(device))

    def inputs(self, rollouts: Rollouts) -> dict[str, Any]:
        """The arguments of the transformer."""
        return {"input_ids": rollouts.all_token_ids[self.tokens]}
