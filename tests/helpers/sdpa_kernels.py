"""Whether CUDA has a fast kernel for a call of scaled dot product attention, found without a GPU.

Else PyTorch takes its math kernel, which writes all scores to memory. The rules are those of torch 2.11 to 2.13 on sm80
and newer, for head sizes up to 192; tests/gpu/test_kernels.py holds them against PyTorch's own choice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers.host_syncs import line_of_caller


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and what was found about it."""

    line: str
    """Where attention was called."""
    fast: bool
    begins: bool
    """Whether it reads several positions and is causal."""
    gradient: bool


def is_fast(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether flash or memory-efficient attention takes these arguments of `scaled_dot_product_attention`."""
    states, dtypes = (query, key, value), {query.dtype, key.dtype, value.dtype}
    if torch.is_autocast_enabled(query.device.type):
        dtypes = {torch.get_autocast_dtype(query.device.type)}
    tensors = states if attn_mask is None else (*states, attn_mask)
    if len(dtypes) > 1 or query.ndim != 4 or any(tensor.stride(-1) != 1 for tensor in tensors):
        return False
    half, size = dtypes <= {torch.float16, torch.bfloat16}, query.shape[-1]
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    square = not is_causal or query.shape[-2] == key.shape[-2]
    flash = half and attn_mask is None and value.shape[-1] == size and square and (same_heads or enable_gqa)
    sizes_fit = size % (8 if half else 4) == value.shape[-1] % (8 if half else 4) == 0
    aligned = all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in states)
    return flash or (same_heads and sizes_fit and aligned)


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            options = kwargs or {}
            gradient = torch.is_grad_enabled() and any(state.requires_grad for state in args[:3])
            begins = args[0].shape[-2] > 1 and bool(options.get("is_causal"))
            self.calls.append(Call(line_of_caller(), is_fast(*args, **options), begins, gradient))
        return function(*args, **(kwargs or {}))


@contextmanager
def attention_calls() -> Iterator[list[Call]]:
    """Collects every call of scaled dot product attention in the block."""
    with _Recorder() as recorder:
        yield recorder.calls
