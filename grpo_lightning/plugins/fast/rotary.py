"""Rotary position embeddings in one pass each way, which keep nothing but the angles.

With (a, b) the halves of a head's states, their cosines and sines,

    a' = a cos_a - b sin_a        b' = b cos_b + a sin_b
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, H, T, D], [B, 1, T, D], [B, 1, T, D] -> [B, H, T, D], which lies in memory as the states do."""
    output = states * cos
    (a, b), (to_a, to_b), (sin_a, sin_b) = states.chunk(2, -1), output.chunk(2, -1), sin.chunk(2, -1)
    to_a.addcmul_(b, sin_a, value=-1)
    to_b.addcmul_(a, sin_b)
    return output


class _Rotated(torch.autograd.Function):
    """See the file's docstring."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = states.dtype
        return rotated(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Rotates back: the sines of the two halves are exchanged and change sign."""
        cos, sin = ctx.saved_tensors
        return rotated(gradient, cos, -sin.roll(sin.shape[-1] // 2, -1)).to(ctx.dtype), None, None


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """[B, H, T, D], [B, K, T, D] queries and keys, turned by the angles of [B, T, D] cosines and sines."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    if not torch.is_grad_enabled():
        return rotated(q, cos, sin), rotated(k, cos, sin)
    return _Rotated.apply(q, cos, sin), _Rotated.apply(k, cos, sin)
