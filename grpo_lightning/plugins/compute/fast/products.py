"""Products of linear layers, forward and backward, by torch or by oneDNN.

torch uses the library that it was built with, mostly MKL. On AMD's processors MKL reaches half the speed of oneDNN in
float32. In bfloat16 torch uses oneDNN already.
"""

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from grpo_lightning.policy.architecture import Float32Linear
from grpo_lightning.types import UsageError


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N, K], [M, K], [M] -> [N, M] float32: left times right transposed, plus bias. Both may have any strides."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return output


class _Linear(torch.autograd.Function):
    """A linear layer by oneDNN, forward and backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden.flatten(0, -2), weight, bias).unflatten(0, hidden.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            product(rows, weight.t()).view_as(hidden) if needs_hidden else None,
            gradient_of_weight(rows, hidden.flatten(0, -2)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def gradient_of_weight(gradient: Tensor, hidden: Tensor) -> Tensor:
    """[N, M], [N, K] -> [M, K] gradient of the weight.

    oneDNN transposes the left factor in an extra pass, in one thread. So the narrower matrix stands on the left.
    """
    if gradient.shape[1] <= hidden.shape[1]:
        return product(gradient.t(), hidden.t())
    return product(hidden.t().contiguous(), gradient.t()).t().contiguous()


class OneDNNLinear(nn.Linear):
    """A linear layer that multiplies float32 on a CPU by oneDNN, forward and backward, and everything else by torch."""

    def forward(self, input: Tensor) -> Tensor:
        if not takes(input, self.weight):
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)


def takes(hidden: Tensor, weight: Tensor) -> bool:
    """Returns whether `product` can multiply these states and this weight."""
    return (
        hidden.dtype == weight.dtype == torch.float32
        and hidden.device.type == weight.device.type == "cpu"
        and hidden.dim() > 1
        and hidden.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def is_plain(layer: nn.Module) -> bool:
    """Returns whether a call of `layer` is no more than the product with its weight, and the weight is not sharded."""
    return (
        type(layer) in (nn.Linear, OneDNNLinear, Float32Linear)
        and "forward" not in layer.__dict__
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and not isinstance(layer.weight, DTensor)
    )


def by_onednn(products: str) -> bool:
    """Returns whether oneDNN multiplies: with `onednn`, or with `auto` on a processor of AMD."""
    available = torch.backends.mkldnn.is_available()
    if products == "onednn" and not available:
        raise UsageError(
            "model.policy.compute.products=onednn: this torch was built without oneDNN; use products=torch"
        )
    return products == "onednn" or (products == "auto" and available and "AuthenticAMD" in processor())


def processor() -> str:
    """Returns a text that names the maker of this machine's processor; empty if unknown."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(errors="replace")
    return platform.processor()


def use_onednn(model: nn.Module) -> None:
    """Makes every plain linear layer of `model` a `OneDNNLinear`. Weights and their names stay as they are."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = OneDNNLinear
