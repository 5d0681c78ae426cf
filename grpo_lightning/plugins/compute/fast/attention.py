"""Calls of scaled dot product attention that avoid the slow "math" kernel on a GPU.

That kernel writes all scores to memory and keeps them for the backward pass. The fast kernels have limits: flash takes
no mask and no float32, and memory-efficient attention takes no `enable_gqa` (torch 2.11 to 2.13, sdp_utils.cpp). So
under a mask, query heads that share a key head become more queries of it. Keys and values are repeated only where there
is neither flash nor a mask.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FLASH_HEAD_SIZE = 256  # largest head size that flash takes


def causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, dropout: float = 0.0) -> Tensor:
    """[B, H, L, D], [B, K, L, D], [B, K, L, E] -> [B, H, L, E]: each position sees itself and earlier ones."""
    groups = query.shape[1] // key.shape[1]
    flash = query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= FLASH_HEAD_SIZE
    if groups > 1 and not flash:
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=groups > 1
    )


def masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0
) -> Tensor:
    """[B, H, L, D], [B, K, S, D], [B, K, S, E] -> [B, H, L, E]: one product per key head.

    `mask` is as `fold_mask` makes it, [B or 1, 1, (H / K) * L or 1, S]; None: every query sees every key.
    """
    rows, heads, length, size = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1] * length, size)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling, dropout_p=dropout)
    return output.reshape(rows, heads, length, value.shape[-1])


def fold_mask(offset: int, length: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, groups * length, offset + length] for `masked`: query i sees the keys up to offset + i.

    Attention would convert a bool mask at every call, and keep the result.
    """
    keys = offset + length
    seen = torch.arange(keys, device=device) <= offset + torch.arange(length, device=device)[:, None]
    return additive(seen.repeat(groups, 1)[None, None], dtype)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., S] bool -> [..., S] of `dtype`, to be added to the scores: 0 where a key is seen, else -inf.

    Its rows start at multiples of 8 elements, otherwise a GPU's kernel would copy it first.
    """
    keys = seen.shape[-1]
    padded = torch.zeros(*seen.shape[:-1], -(-keys // 8) * 8, dtype=dtype, device=seen.device)
    return padded[..., :keys].masked_fill_(~seen, -torch.inf)


def computed_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type that attention to states of `dtype` computes in: autocast's, where it is on."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
