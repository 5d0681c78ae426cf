"""Calls of scaled dot product attention that avoid the slow "math" kernel on a GPU.

That kernel writes all scores to memory and keeps them for the backward pass. The fast kernels have limits: flash takes
no mask and no float32, and memory-efficient attention takes no `enable_gqa` (torch 2.11 to 2.13, sdp_utils.cpp). So
under a mask, query heads that share a key head become more queries of it. Keys and values are repeated only where there
is neither flash nor a mask.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FLASH_HEAD_SIZE = 256
"""Largest head size that flash takes."""


def causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, dropout: float = 0.0) -> Tensor:
    """[B, H, L, D], [B, K, L, D], [B, K, L, E] -> [B, H, L, E]: each position sees itself and earlier ones."""
    heads_per_key = query.shape[1] // key.shape[1]
    has_flash = query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= FLASH_HEAD_SIZE
    shares_keys = heads_per_key > 1
    if shares_keys and not has_flash:
        key = key.repeat_interleave(heads_per_key, 1)
        value = value.repeat_interleave(heads_per_key, 1)
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=shares_keys and has_flash
    )


def masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0
) -> Tensor:
    """[B, H, L, D], [B, K, S, D], [B, K, S, E] -> [B, H, L, E]: one product per key head.

    `mask` is [B or 1, 1, (H / K) * L or 1, S], as `fold_mask` makes it. With None every query sees every key.
    """
    rows, heads, length, size = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1] * length, size)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling, dropout_p=dropout)
    return output.reshape(rows, heads, length, value.shape[-1])


def fold_mask(offset: int, length: int, heads_per_key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, heads_per_key * length, offset + length] mask for `masked`: query i sees the keys up to offset + i.

    It is not bool: attention would convert a bool mask at every call, and keep the result.
    """
    num_keys = offset + length
    is_visible = torch.arange(num_keys, device=device) <= offset + torch.arange(length, device=device)[:, None]
    return additive(is_visible.repeat(heads_per_key, 1)[None, None], dtype)


def additive(is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., S] bool -> [..., S] of `dtype`, to be added to the scores: 0 for visible keys, -inf for others.

    Rows of the mask start at multiples of 8 elements; a GPU's kernel would copy any other mask first.
    """
    num_keys = is_visible.shape[-1]
    padded = torch.zeros(*is_visible.shape[:-1], -(-num_keys // 8) * 8, dtype=dtype, device=is_visible.device)
    return padded[..., :num_keys].masked_fill_(~is_visible, -torch.inf)


def computed_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Returns the type that attention computes in: autocast's where it is on, else `dtype`, the type of the states."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
