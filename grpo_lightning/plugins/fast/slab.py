"""A key-value cache layer in one preallocated slab: decoding appends in place and never copies what is there."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from grpo_lightning.plugins.fast import attention as kernels
from grpo_lightning.plugins.fast.prompt_part import Groups, PromptPart, in_two_parts, of_products, takes_products

PROMPTS = "grpo_prompts"
"""Attribute of keys, by which attention finds the `PromptPart` that goes with them."""


class SlabLayer(DynamicLayer):
    """Keys and values of up to `capacity` positions, [B, heads, capacity, head size] each, filled from the left.

    After `share` the positions before are those of the prompts, apart, and the slab holds what follows them.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0
        self.prompts: PromptPart | None = None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, rows: int, length: int) -> "SlabLayer":
        """A full layer [rows, K, length, D] of zeros, for keys [N, K, D] and values [N, K, E] of tokens."""
        layer = cls(length)
        layer.dtype, layer.device, layer.length = keys.dtype, keys.device, length
        layer.key_slab, layer.value_slab = (
            states.new_zeros(rows, states.shape[1], length, states.shape[2]) for states in (keys, values)
        )
        layer.is_initialized = True
        return layer

    def grown(self, rows: int) -> "SlabLayer":
        """A full layer of so many rows, which begins with those of this one; the others are zeros."""
        own = len(self.key_slab)
        layer = SlabLayer.of(self.key_slab[:, :, 0], self.value_slab[:, :, 0], rows, self.length)
        layer.key_slab[:own], layer.value_slab[:own] = self.key_slab, self.value_slab
        return layer

    def of_rows(self, rows: slice) -> "SlabLayer":
        """An empty layer, which fills these rows of this one."""
        layer = SlabLayer(self.capacity)
        layer.dtype, layer.device, layer.is_initialized = self.dtype, self.device, True
        layer.key_slab, layer.value_slab = self.key_slab[rows], self.value_slab[rows]
        return layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the slab when the first states show its type and sizes."""
        kind = key_states.device.type
        # Under autocast, attention would cast the whole cache at every token.
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else key_states.dtype
        self.device = key_states.device
        self._allocate(key_states, value_states, key_states.shape[0])
        self.is_initialized = True

    def _allocate(self, keys: Tensor, values: Tensor, rows: int) -> None:
        shape = (rows, keys.shape[1], self.capacity)
        self.key_slab = keys.new_empty(*shape, keys.shape[3], dtype=self.dtype)
        self.value_slab = values.new_empty(*shape, values.shape[3], dtype=self.dtype)

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
        if self.prompts is not None:
            self.keys.__dict__[PROMPTS] = self.prompts
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Positions filled so far, those of the prompts included."""
        return self.length + (0 if self.prompts is None else self.prompts.keys.shape[2])

    def at(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """[N, K, D] keys and [N, K, E] values of tokens, copied.

        Args:
            row: [N] int64.
            column: [N] int64; the columns of shared prompts come first.
        """
        if self.prompts is None:
            return self.key_slab[row, :, column], self.value_slab[row, :, column]
        prompt, width = self.prompts.groups.prompt[row], self.prompts.keys.shape[2]
        own = column >= width
        of_prompt = column.clamp(max=width - 1)
        keys, values = self.prompts.keys[prompt, :, of_prompt], self.prompts.values[prompt, :, of_prompt]
        keys[own] = self.key_slab[row[own], :, column[own] - width]
        values[own] = self.value_slab[row[own], :, column[own] - width]
        return keys, values

    def expand(self, rows: Tensor, capacity: int) -> None:
        """Makes row i of a slab of the new capacity a copy of row `rows[i]` of this one.

        Args:
            rows: [B] int64 indices of rows; a row may occur any number of times.
            capacity: Positions of the new slab.
        """
        keys, values = self._view()
        self.capacity = capacity
        self._allocate(keys, values, len(rows))
        self.key_slab[:, :, : self.length] = keys.index_select(0, rows)
        self.value_slab[:, :, : self.length] = values.index_select(0, rows)
        self._view()

    def share(self, groups: Groups, capacity: int) -> None:
        """Makes what is here the prompts of rows [r] of a new slab, which has no position yet.

        Args:
            groups: Which rows go on from which prompt.
            capacity: Positions of the new slab.
        """
        keys, values = self._view()
        self.prompts = PromptPart(keys, values, groups)
        self.capacity, self.length = capacity, 0
        self._allocate(keys, values, len(groups.prompt))

    def keep(self, rows: Tensor) -> None:
        """Compacts the slab to `rows` [r]. The memory of the others is not freed."""
        keys, values = self._view()
        self.key_slab[: len(rows), :, : self.length] = keys.index_select(0, rows)
        self.value_slab[: len(rows), :, : self.length] = values.index_select(0, rows)
        self.key_slab, self.value_slab = self.key_slab[: len(rows)], self.value_slab[: len(rows)]
        self._view()

    def regroup(self, prompts: Tensor, groups: Groups) -> None:
        """Keeps the `prompts` alone, after `keep` has kept the rows of `groups`."""
        assert self.prompts is not None
        self.prompts = self.prompts.keep(prompts, groups)
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
    """Attention over a slab: a causal prefill, or one new token per row.

    In decoding, all query heads of a key head are one product.

    Args:
        module: The attention module, unused.
        query: [B, H, L, D]; L is the length of `key` (prefill) or 1 (decoding).
        key: [B, K, S, D] with K dividing H.
        value: [B, K, S, D].
        attention_mask: As `mask` makes it.
        scaling: Factor of the scores.
        dropout: Unused: sampling has none.
        **kwargs: What other attention functions may need. Those that would change the result are refused.
    """
    _refuse(kwargs)
    length = query.shape[2]
    if length > 1 and attention_mask is None:
        output = kernels.causal(query, key, value, scaling)
    else:
        groups = query.shape[1] // key.shape[1]
        folded = attention_mask.repeat(1, 1, groups, 1) if attention_mask is not None and length > 1 else attention_mask
        output = kernels.masked(query, key, value, folded, scaling)
    return output.transpose(1, 2).contiguous(), None


def sharing_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """As `attention`, which it differs from by rounding: to prompts where they are shared, by the faster kernel.

    Args:
        module: As there.
        query: As there.
        key: As there. Keys of a slab that shares its prompts bring them along.
        value: As there.
        attention_mask: As there.
        scaling: As there.
        dropout: As there.
        **kwargs: As there.
    """
    prompts: PromptPart | None = key.__dict__.get(PROMPTS)
    query = query.to(key.dtype)  # Under autocast the slab has fewer bits, and products would round the scores.
    if prompts is None and (query.shape[2] > 1 or not takes_products(query)):
        return attention(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    _refuse(kwargs)
    if prompts is None:
        output = of_products(query, key, value, attention_mask, scaling)
    else:
        output = in_two_parts(query, key, value, attention_mask, scaling, prompts)
    return output.transpose(1, 2).contiguous(), None


def _refuse(kwargs: dict[str, object]) -> None:
    """Raises NotImplementedError for arguments that would change the result."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")


def mask(
    q_length: int,
    kv_length: int,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | None = None,
    **kwargs: object,
) -> Tensor | None:
    """The mask that `attention` takes, [B or 1, 1, L, S] bool or None; it replaces those of transformers.

    Args:
        q_length: L: that of the prompts (prefill, right-padded) or 1 (decoding).
        kv_length: S.
        mask_function: Whether the query at one position sees the key at another.
        attention_mask: [B, S] bool in decoding where prompts differ in length: False on the padding between prompt
            and completion.
        local_size: Width of a window or chunk; None if every key is seen.
        device: Where the mask is made.
        **kwargs: What other masks need.
    """
    known = None if attention_mask is None else attention_mask[:, None, None, :kv_length]
    if local_size is None or kv_length <= local_size:
        return known
    if attention_mask is None:
        keys = torch.arange(kv_length, device=device)[None]
    else:
        keys = attention_mask[:, :kv_length].cumsum(-1) - 1
    seen = mask_function(0, 0, keys[:, -q_length:, None], keys[:, None, :])[:, None]
    return seen if known is None else seen & known
