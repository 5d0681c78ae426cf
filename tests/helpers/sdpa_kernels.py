"""Which kernel CUDA takes for a call of scaled dot product attention, by PyTorch's own rules and without a GPU.

The rules are those of torch 2.11 to 2.13: `can_use_flash_attention`, `can_use_mem_efficient_attention` and
`priority_order` of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp with the checks of sdp_utils_cpp.h, which the
installed torch has among its headers. Later versions give memory-efficient attention `enable_gqa` (pytorch#191085).
cuDNN's is left out: it comes first on sm90 and sm100 with cuDNN above 9.15, and behind math elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers.host_syncs import line_of_caller

FLASH, EFFICIENT, MATH = "flash", "efficient", "math"

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Call:
    """What a kernel is chosen by."""

    line: str
    """Where attention was called."""
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    """Of queries, keys and values, after autocast; float64 stands for different ones."""
    mask: bool
    """Whether there is one, bool or float."""
    dense: bool
    """Whether the last dimension of all tensors has stride 1."""
    aligned: bool
    """Whether all tensors start at a multiple of 16 bytes of their memory."""
    is_causal: bool
    enable_gqa: bool
    dropout: float
    gradient: bool
    """Whether queries, keys or values need one."""

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "Call":
        """The call with these arguments, those of `scaled_dot_product_attention`."""
        states = (query, key, value)
        tensors = states if attn_mask is None else (*states, attn_mask)
        dtypes = {tensor.dtype for tensor in states}
        if torch.is_autocast_enabled(query.device.type) and torch.float64 not in dtypes:
            dtypes = {torch.get_autocast_dtype(query.device.type)}
        return cls(
            line=line_of_caller(),
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            dtype=dtypes.pop() if len(dtypes) == 1 else torch.float64,
            mask=attn_mask is not None,
            dense=all(tensor.stride(-1) == 1 for tensor in tensors),
            aligned=all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in states),
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            dropout=dropout_p,
            gradient=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states),
        )

    def kernel(self, capability: Capability = (8, 0)) -> str:
        """The kernel on a GPU of this compute capability, 8.0 or newer."""
        if self._flash(capability):
            return FLASH
        return EFFICIENT if self._efficient() else MATH

    def _flash(self, capability: Capability) -> bool:
        size = self.query[-1]
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        small_cache = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
        no_backward = self.gradient and small_cache and (192 < size <= 224 or (size > 224 and self.dropout > 0))
        return (
            self._shapes()
            and not self.mask
            and self.dtype in (torch.float16, torch.bfloat16)
            and self.key[-1] == self.value[-1] == size <= 256
            and not no_backward
            and not (self.is_causal and self.query[-2] != self.key[-2])
            and (self._same_heads() or (self.enable_gqa and self._divisible_heads()))
        )

    def _efficient(self) -> bool:
        # minimum_gemm_alignment. Flash pads the head size for its callers; this kernel does not.
        alignment = 4 if self.dtype == torch.float32 else 8
        return (
            self._shapes()
            and self.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and self.query[-1] == self.key[-1]
            and self.query[-1] % alignment == self.value[-1] % alignment == 0
            and self.aligned
            and self._same_heads()
        )

    def _shapes(self) -> bool:
        shapes = (self.query, self.key, self.value)
        return (
            all(len(shape) == 4 for shape in shapes)
            and self.query[0] == self.key[0] == self.value[0]
            and self.query[-2] > 0
            and self.key[-2] > 0
            and self.dense
        )

    def _same_heads(self) -> bool:
        return self.query[1] == self.key[1] == self.value[1]

    def _divisible_heads(self) -> bool:
        return self.key[1] == self.value[1] and self.query[1] % self.key[1] == 0


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append(Call.of(*args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


@contextmanager
def attention_calls() -> Iterator[list[Call]]:
    """Collects every call of scaled dot product attention in the block."""
    with _Recorder() as recorder:
        yield recorder.calls
