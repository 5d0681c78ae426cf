"""Prompts and completions row by row: one sequence per completion, padded on the right to the longest."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths import ragged
from grpo_lightning.maths.rollouts import Rollouts


@dataclass(slots=True)
class PaddedRows:
    """Where everything stands in [B, T - 1], T the longest sequence: its last token predicts nothing.

    With causal attention no token sees the padding behind it, so no mask is needed and the model's own positions are
    right.
    """

    tokens: Tensor
    """[B, T - 1] index of each token among those of all prompts and then all completions; 0 for padding."""
    predicts: Tensor
    """[N] index, in the flattened rows, of the token behind which each completion token was drawn."""

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "PaddedRows":
        """Lays out the prompts and completions of `rollouts`. The work is done on the host."""
        sizes, device = rollouts.sizes, rollouts.token_ids.device
        prompt_lengths = sizes.prompt_lengths[sizes.group]
        width = int(sizes.sequence_lengths.max()) - 1
        index = torch.zeros(len(prompt_lengths), width + 1, dtype=torch.int64)
        prompt_tokens = ragged.take(sizes.group, sizes.prompt_lengths)
        index[ragged.segments(prompt_lengths), ragged.positions(prompt_lengths)] = prompt_tokens
        row = ragged.segments(sizes.lengths)
        position = ragged.spread(prompt_lengths, sizes.lengths) + ragged.positions(sizes.lengths)
        index[row, position] = int(sizes.prompt_lengths.sum()) + torch.arange(len(row))
        return cls(tokens=index[:, :-1].to(device), predicts=(row * width + position - 1).to(device))

    def inputs(self, rollouts: Rollouts) -> dict[str, Any]:
        """What the transformer is called with."""
        return {"input_ids": torch.cat([rollouts.prompt_token_ids, rollouts.token_ids])[self.tokens]}
