"""A key-value cache layer in one preallocated slab: decoding appends in place, and never copies earlier positions."""

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
        """Number of positions that are filled."""

    def allocate(self, states: Sequence[Tensor], num_rows: int) -> None:
        """Allocates zeros for `num_rows` rows, with heads and types as in `states`.

        Args:
            states: [..., heads, positions, head size] keys, and values.
            num_rows: B.
        """
        self.device = states[0].device
        self.is_initialized = True
        # Attention's type: under autocast it would cast the whole cache at every token.
        self.dtype = kernels.computed_in(self.device, states[0].dtype)
        self.slabs = [
            tensor.new_zeros(num_rows, tensor.shape[-3], self.capacity, tensor.shape[-1], dtype=self.dtype)
            for tensor in states
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends the states of new positions, and returns the states of all positions, as views."""
        start = self.length
        self.length += key_states.shape[2]
        for slab, states in zip(self.slabs, (key_states, value_states), strict=True):
            slab[:, :, start : self.length] = states
        keys, values = self.slabs
        return keys[:, :, : self.length], values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def expand(self, rows: Tensor, capacity: int) -> None:
        """Allocates slabs of the new capacity, in which row i is a copy of row `rows[i]`. A row may occur again."""
        old_slabs = self.slabs
        self.capacity = capacity
        # Zeros: memory may hold anything, and a weight of 0 times NaN is NaN.
        self.slabs = [slab.new_zeros(len(rows), slab.shape[1], capacity, slab.shape[3]) for slab in old_slabs]
        for slab, old_slab in zip(self.slabs, old_slabs, strict=True):
            slab[:, :, : self.length] = old_slab.index_select(0, rows)

    def keep(self, rows: Tensor) -> None:
        """Compacts the slabs to `rows` [r]. The memory of the other rows is not freed."""
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
    """[B, H, L, D], [B, K, S, D] x 2 -> [B, L, H, D]: a causal prefill with L = S, or new tokens under a mask.

    With `shared_prompts` the keys and values are of completions alone.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    is_prefill = query.shape[2] > 1
    shared_prompts = kwargs.get("shared_prompts")
    if isinstance(shared_prompts, SharedPrompts):
        output = shared_prompts.attend(module.layer_idx, query.to(key.dtype), key, value, scaling)
    elif is_prefill and attention_mask is None:
        output = kernels.causal(query, key, value, scaling)
    else:
        if is_prefill and attention_mask is not None:
            attention_mask = attention_mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
        output = kernels.masked(query, key, value, attention_mask, scaling)
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
    """[B or 1, 1, L, S] mask for `attention`, to be added to the scores; None if every key is visible.

    It takes the place of transformers' masks, and is called once per kind of layer. In decoding, if prompts differ in
    length, some keys are padding between prompt and completion.

    Args:
        q_length: L, new tokens.
        kv_length: S, all tokens.
        mask_function: Returns whether a query sees a key, from their positions.
        attention_mask: [B, at least S] bool, False on padding; None without padding.
        local_size: Width of a window or chunk; None without one.
        device: Device of the mask.
        dtype: Type of the states, without autocast.
        kwargs: Further arguments of transformers, which are not read.
    """
    is_visible = None if attention_mask is None else attention_mask[:, None, None, :kv_length]
    if local_size is not None and kv_length > local_size:
        # Positions of the keys: padding takes none.
        if attention_mask is None:
            positions = torch.arange(kv_length, device=device)[None]
        else:
            positions = attention_mask[:, :kv_length].cumsum(-1) - 1
        is_inside = mask_function(0, 0, positions[:, -q_length:, None], positions[:, None, :])[:, None]
        is_visible = is_inside if is_visible is None else is_visible & is_inside
    return None if is_visible is None else kernels.additive(is_visible, kernels.computed_in(is_visible.device, dtype))
