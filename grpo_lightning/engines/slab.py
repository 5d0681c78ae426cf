"""A key-value cache layer in one preallocated slab: decoding writes into it and never copies what is there."""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class SlabLayer(DynamicLayer):
    """Keys and values of up to `capacity` positions, [B, heads, capacity, head size] each, filled from the left."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._allocate(key_states, value_states, key_states.shape[0])
        self.is_initialized = True

    def _allocate(self, keys: Tensor, values: Tensor, rows: int) -> None:
        self.key_slab = keys.new_empty(rows, keys.shape[1], self.capacity, keys.shape[3])
        self.value_slab = values.new_empty(rows, values.shape[1], self.capacity, values.shape[3])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends the states of new positions and returns all, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.key_slab[:, :, self.length : end] = key_states
        self.value_slab[:, :, self.length : end] = value_states
        self.length = end
        return self._view()

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.key_slab[:, :, : self.length], self.value_slab[:, :, : self.length]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def expand(self, group_size: int, capacity: int) -> None:
        """Repeats every row `group_size` times, into a slab of the new capacity."""
        keys, values = self._view()
        self.capacity = capacity
        self._allocate(keys, values, keys.shape[0] * group_size)
        # [B, 1, ...] into [B, G, ...]: the one copy of the prompt's states that there is.
        self.key_slab.unflatten(0, (-1, group_size))[:, :, :, : self.length] = keys[:, None]
        self.value_slab.unflatten(0, (-1, group_size))[:, :, :, : self.length] = values[:, None]
        self._view()

    def keep(self, rows: Tensor) -> None:
        """Compacts the slab to `rows` [r]."""
        keys, values = self._view()
        self.key_slab[: len(rows), :, : self.length] = keys.index_select(0, rows)
        self.value_slab[: len(rows), :, : self.length] = values.index_select(0, rows)
        self.key_slab, self.value_slab = self.key_slab[: len(rows)], self.value_slab[: len(rows)]
        self._view()


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention over a slab: a causal prefill, or one new token a row with a key head's query heads in one product.

    Args:
        module: The attention module, unused.
        query: [B, H, L, D]; L is the length of `key` (prefill) or 1 (decoding).
        key: [B, K, S, D] with K dividing H.
        value: [B, K, S, D].
        attention_mask: [B, 1, 1, S] bool in decoding where prompts differ in length, else None.
        scaling: Factor of the scores.
        dropout: Unused: sampling has none.
        **kwargs: What other attention functions may need; what would change the result, such as a sliding
            window shorter than S, is refused.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    window = kwargs.get("sliding_window")
    if isinstance(window, int) and key.shape[2] > window:
        raise NotImplementedError(f"a sliding window of {window} tokens")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows, heads, length, size = query.shape
    if length > 1:
        output = sdpa(query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1])
        return output.transpose(1, 2).contiguous(), None
    packed = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    output = sdpa(packed, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, output.shape[-1]), None
