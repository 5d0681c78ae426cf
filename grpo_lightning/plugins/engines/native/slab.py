"""A key-value cache layer in one preallocated slab: decoding appends in place and never copies what is there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from grpo_lightning.plugins.compute.fast import attention as kernels
from grpo_lightning.plugins.engines.native.shared_prompts import SharedPrompts


class SlabLayer(DynamicLayer):
    """Keys and values of up to `capacity` positions, [B, heads, capacity, head size] each, filled from the left."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def allocate(self, states: Sequence[Tensor], rows: int) -> None:
        """Makes room for so many rows of keys and values such as these [..., heads, positions, head size]: zeros."""
        self.device, self.is_initialized = states[0].device, True
        # Under autocast, attention would cast the whole cache at every token.
        self.dtype = kernels.computed_in(self.device, states[0].dtype)
        self.slabs = [
            each.new_zeros(rows, each.shape[-3], self.capacity, each.shape[-1], dtype=self.dtype) for each in states
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends the states of new positions and returns all, as views."""
        first, self.length = self.length, self.length + key_states.shape[2]
        for slab, states in zip(self.slabs, (key_states, value_states), strict=True):
            slab[:, :, first : self.length] = states
        keys, values = self.slabs
        return keys[:, :, : self.length], values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def expand(self, rows: Tensor, capacity: int) -> None:
        """Makes row i of a slab of the new capacity a copy of row `rows[i]`, which may occur any number of times."""
        old, self.capacity = self.slabs, capacity
        # Zeros: a weight of 0 times what memory happens to hold may be NaN.
        self.slabs = [slab.new_zeros(len(rows), slab.shape[1], capacity, slab.shape[3]) for slab in old]
        for slab, before in zip(self.slabs, old, strict=True):
            slab[:, :, : self.length] = before.index_select(0, rows)

    def keep(self, rows: Tensor) -> None:
        """Compacts the slab to `rows` [r]. The memory of the others is not freed."""
        for slab in self.slabs:
            slab[: len(rows), :, : self.length] = slab[:, :, : self.length].index_select(0, rows)
        self.slabs = [slab[: len(rows)] for slab in self.slabs]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """[B, H, L, D], [B, K, S, D] x 2 -> [B, L, H, D]: a causal prefill with L = S, or new tokens under a mask."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    length, shared = query.shape[2], kwargs.get("shared_prompts")
    if isinstance(shared, SharedPrompts):
        output = shared.attend(module.layer_idx, query.to(key.dtype), key, value, scaling)
    elif length > 1 and attention_mask is None:
        output = kernels.causal(query, key, value, scaling)
    else:
        groups = query.shape[1] // key.shape[1]
        folded = attention_mask.repeat(1, 1, groups, 1) if attention_mask is not None and length > 1 else attention_mask
        output = kernels.masked(query, key, value, folded, scaling)
    return output.transpose(1, 2).contiguous(), None


def mask(
    q_length: int,
    kv_length: int,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: object,
) -> Tensor | None:
    """The mask that `attention` takes, [B or 1, 1, L, S] to be added or None; it replaces those of transformers.

    In decoding, where prompts differ in length, `attention_mask` [B, S] is False on the padding between prompt and
    completion. `local_size` is the width of a window or chunk; `dtype` that of the states, without autocast. It is
    called once per kind of layer: each layer would convert a bool mask again.
    """
    seen = None if attention_mask is None else attention_mask[:, None, None, :kv_length]
    if local_size is not None and kv_length > local_size:
        if attention_mask is None:
            keys = torch.arange(kv_length, device=device)[None]
        else:
            keys = attention_mask[:, :kv_length].cumsum(-1) - 1
        inside = mask_function(0, 0, keys[:, -q_length:, None], keys[:, None, :])[:, None]
        seen = inside if seen is None else seen & inside
    return None if seen is None else kernels.additive(seen, kernels.computed_in(seen.device, dtype))
