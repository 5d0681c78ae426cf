"""Copies of a model's linear layers for decoding: in the layout that few rows read fastest, or in a smaller type."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_lightning.plugins.compute.fast.products import OneDNNLinear
from grpo_lightning.policy.architecture import Float32Linear, head_dtype, trunk_of
from grpo_lightning.policy.policy import Policy

ROWS = 16
"""Rows that a layout is made for. oneDNN chooses the same layout from 2 rows to thousands."""


class LinearCopies:
    """Copies of the weights of a policy's linear layers, for decoding.

    Copies do not follow the policy: make them again after every update. Layers of other kinds, such as quantised layers
    and the experts of a mixture, keep their weights. If head and embedding share a tensor, only the head is copied.

    On a CPU the copies are packed for oneDNN. On AMD's processors its products of few rows take a third of MKL's time,
    and differ by rounding. On other devices a layer is copied only into another type.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.dtype = dtype
        forwards = {layer: _forward(layer, dtype) for layer in linear_layers(policy.model)}
        self._forwards = {layer: forward for layer, forward in forwards.items() if forward}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which the layers compute with their copies."""
        for layer, forward in self._forwards.items():
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in self._forwards:
                del layer.__dict__["forward"]


def linear_layers(model: PreTrainedModel) -> list[Any]:
    """Returns the linear layers of the transformer and its head."""
    layers = [*trunk_of(model).modules(), model.get_output_embeddings()]
    return [layer for layer in layers if type(layer) in (nn.Linear, OneDNNLinear, Conv1D, Float32Linear)]


def casts_weights(model: PreTrainedModel) -> bool:
    """Returns whether a linear layer would cast its weight at every decoded position.

    Lightning opens autocast without its cache, and a float32 head may have weights of another type.
    """
    return any(layer.weight.dtype != head_dtype(layer) for layer in linear_layers(model))


def copied_bytes(model: PreTrainedModel, dtype: torch.dtype, device: str) -> int:
    """Returns the bytes of the copies of `model`, for products of `dtype` on a device of this kind."""
    return sum(
        layer.weight.numel() * copy_dtype.itemsize
        for layer in linear_layers(model)
        if (copy_dtype := _copy_dtype(layer, dtype, device))
    )


def _packs(dtype: torch.dtype, device: str) -> bool:
    """Returns whether oneDNN has a special layout for weights of this type."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _copy_dtype(layer: Any, dtype: torch.dtype, device: str) -> torch.dtype | None:
    """Returns the type for a copy of the layer's weight, for products of `dtype`; None if a copy would be no faster."""
    packs = _packs(dtype, device)
    if isinstance(layer, Float32Linear):
        dtype, packs = torch.float32, False
    return dtype if packs or layer.weight.dtype != dtype else None


@torch.no_grad()
def _forward(layer: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """Returns a forward that computes with a copy of the layer's weight; None if a copy would be no faster."""
    weight = layer.weight.detach()
    device = weight.device.type
    copy_dtype = _copy_dtype(layer, dtype, device)
    if copy_dtype is None:
        return None
    weight = (weight.t() if isinstance(layer, Conv1D) else weight).to(copy_dtype)
    bias = None if layer.bias is None else layer.bias.detach().to(copy_dtype)
    if isinstance(layer, Float32Linear):
        copied: Any = SimpleNamespace(weight=weight, bias=bias)
        return partial(Float32Linear.forward, copied)
    if _packs(copy_dtype, device):
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    return partial(_product, dtype, weight, bias)


def _product(dtype: torch.dtype, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
    """Returns the layer's output, in the type that the rest of the model computes in."""
    cast = hidden.to(dtype)
    output: Tensor
    if weight.is_mkldnn:
        output = torch.ops.mkldnn._linear_pointwise(cast, weight, bias, "none", [], "")
    else:
        output = nn.functional.linear(cast, weight, bias)
    return output if torch.is_autocast_enabled(hidden.device.type) else output.to(hidden.dtype)
