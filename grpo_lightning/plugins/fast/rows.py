"""The rows of the cache that are decoded together."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from grpo_lightning.plugins.fast.prompt_part import Groups
from grpo_lightning.plugins.fast.slab import SlabLayer
from grpo_lightning.policy.policy import Policy


class Rows:
    """Completions that go on, a row of the cache each. All have drawn the same number of tokens.

    Args:
        policy: What to decode with.
        indices: [r] int64, the completion of each row.
        layers: Keys and values of all rows.
        logits: [r, V] float32 of the next tokens.
        width: Columns of the widest prompt.
        mask: [r, C] bool, the columns of the slab that a row sees, filled or not; None sees all.
        windows: Whether the model has sliding windows.
        groups: Which rows share a prompt's keys and values; None where each has a copy.
    """

    def __init__(
        self,
        policy: Policy,
        indices: Tensor,
        layers: list[SlabLayer],
        logits: Tensor,
        width: int,
        mask: Tensor | None,
        windows: bool = False,
        groups: Groups | None = None,
    ) -> None:
        self.policy = policy
        self.indices = indices
        self.layers = layers
        self.cache = Cache(layers=list(layers))
        self.logits = logits
        self.width = width
        self.mask = mask
        self.windows = windows
        self.groups = groups
        self.ended = torch.zeros(len(indices), dtype=torch.bool, device=indices.device)
        """[r] bool, whether a row has ended."""
        self.num_drawn = 0
        """Tokens that each row has drawn."""

    def __len__(self) -> int:
        return len(self.indices)

    def drop_ended(self) -> Tensor:
        """Compacts everything to the rows that go on, and returns the indices of those that have ended."""
        # The one wait for the device: how many rows go on.
        going = (~self.ended).nonzero().squeeze(1)
        ended = self.indices[self.ended.argsort(descending=True, stable=True)[: len(self) - len(going)]]
        if not len(ended):
            return ended
        self.indices, self.logits, self.ended = self.indices[going], self.logits[going], self.ended[going]
        if not len(going):
            self.layers, self.cache = [], Cache(layers=[])
            return ended
        if self.mask is not None:
            self.mask = self.mask[going]
        for layer in self.layers:
            layer.keep(going)
        if self.groups is not None:
            prompts, self.groups = self.groups.keep(going)
            for layer in self.layers:
                layer.regroup(prompts, self.groups)
        return ended

    def decode(self, token: Tensor, position: Tensor) -> None:
        """Finds the logits that follow [r] `token` at [r] `position` in its sequence."""
        mask = None if self.mask is None else self.mask[:, : self.layers[0].length + 1]
        # With four dimensions it goes to the attention as it is, and only `slab.mask` knows windows.
        hidden = self.policy.hidden(
            token[:, None],
            past_key_values=self.cache,
            position_ids=position[:, None],
            attention_mask=mask if mask is None or self.windows else mask[:, None, None],
            use_cache=True,
        )
        self.logits = self.policy.logits(hidden[:, 0])
