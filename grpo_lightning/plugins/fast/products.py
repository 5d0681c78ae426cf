"""Products of linear layers, forward and backward, by torch or by oneDNN.

torch leaves them to the library that it was built with, mostly MKL. On AMD's processors that reaches half of oneDNN's
speed in float32 on a CPU. In bfloat16 torch takes oneDNN by itself.
"""

import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from grpo_lightning.types import UsageError


class TorchProducts:
    """The products of a linear layer and of its backward pass, of any type on any device."""

    @staticmethod
    def output(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[N, K], [M, K], [M] -> [N, M]."""
        return F.linear(hidden, weight, bias)

    @staticmethod
    def for_hidden(gradient: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """[N, M], [M, K], [N, K] -> [N, K] the gradient of the states, plus `total`, which is overwritten."""
        return gradient @ weight if total is None else total.addmm_(gradient, weight)

    @staticmethod
    def for_weights(gradients: Sequence[Tensor | None], hidden: Tensor) -> list[Tensor | None]:
        """[N, M] each, [N, K] -> [M, K] each: the gradients of weights that multiply the same states."""
        return [None if gradient is None else gradient.t() @ hidden for gradient in gradients]


class OneDNNProducts(TorchProducts):
    """The same of float32 on a CPU, by oneDNN.

    It transposes what is multiplied from the left in a pass of its own, in one thread. So that is the narrower one.
    """

    @staticmethod
    def output(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[N, K], [M, K], [M] -> [N, M]."""
        return product(hidden, weight, bias)

    @staticmethod
    def for_hidden(gradient: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """[N, M], [M, K], [N, K] -> [N, K] the gradient of the states, plus `total`."""
        if total is None:
            return product(gradient, weight.t())
        return torch.ops.mkldnn._linear_pointwise.binary(gradient, total, weight.t(), None, "add")

    @staticmethod
    def for_weights(gradients: Sequence[Tensor | None], hidden: Tensor) -> list[Tensor | None]:
        """[N, M] each, [N, K] -> [M, K] each."""
        width = sum(gradient.shape[1] for gradient in gradients if gradient is not None)
        if width <= hidden.shape[1]:
            return [gradient if gradient is None else product(gradient.t(), hidden.t()) for gradient in gradients]
        turned = hidden.t().contiguous()
        return [
            gradient if gradient is None else product(turned, gradient.t()).t().contiguous() for gradient in gradients
        ]


Products = type[TorchProducts]


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N, K], [M, K], [M] -> [N, M] float32: left times right transposed; both may be views of any strides."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden.flatten(0, -2), weight, bias).unflatten(0, hidden.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            OneDNNProducts.for_hidden(rows, weight).view_as(hidden) if for_hidden else None,
            OneDNNProducts.for_weights([rows], hidden.flatten(0, -2))[0] if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


class OneDNNLinear(nn.Linear):
    """A linear layer whose float32 products on a CPU are oneDNN's, forward and backward; others are torch's."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., M]."""
        if not takes(input, self.weight):
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)


def takes(hidden: Tensor, weight: Tensor) -> bool:
    """True where `product` is for these states and this weight."""
    return (
        hidden.dtype == weight.dtype == torch.float32
        and hidden.device.type == weight.device.type == "cpu"
        and hidden.dim() > 1
        and hidden.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def is_plain(layer: nn.Module) -> bool:
    """True where a call of `layer` is no more than the product with its weight, which is here as a whole."""
    return (
        type(layer) in (nn.Linear, OneDNNLinear)
        and "forward" not in layer.__dict__
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and not isinstance(layer.weight, DTensor)
    )


def products_of(layer: nn.Linear, hidden: Tensor) -> Products:
    """The products by which `layer` multiplies these states."""
    return OneDNNProducts if type(layer) is OneDNNLinear and takes(hidden, layer.weight) else TorchProducts


def by_onednn(products: str) -> bool:
    """True where oneDNN is to multiply: asked for, or with `auto` on a processor of AMD."""
    available = torch.backends.mkldnn.is_available()
    if products == "onednn" and not available:
        raise UsageError(
            "model.policy.compute.products=onednn: this torch was built without oneDNN; use products=torch"
        )
    return products == "onednn" or (products == "auto" and available and "AuthenticAMD" in processor())


def processor() -> str:
    """The text that names the maker of this machine's processor; empty if nothing does."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(errors="replace")
    return platform.processor()


def use_onednn(model: nn.Module) -> None:
    """Makes every plain linear layer of `model` a `OneDNNLinear`. Its weights and their names stay as they are."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = OneDNNLinear
