"""The gated MLP of most models, which keeps less for the backward pass.

    y = down(silu(gate(x)) * up(x))

It keeps x and the outputs of gate and up. What `down` multiplies is made again from them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grpo_lightning.plugins.fast.products import Products, is_plain, products_of


def activated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate).mul_(up)


def activation_gradients(gradient: Tensor, silu: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of `activated`; it and silu(gate) are overwritten."""
    for_up = silu.mul_(gradient)
    gradient.mul_(up)
    return torch.ops.aten.silu_backward.grad_input(gradient, gate, grad_input=gradient), for_up


class _Activated(torch.autograd.Function):
    """`activated`, which keeps gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return activated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return activation_gradients(gradient.clone(), F.silu(gate), gate, up)


class _GatedMLP(torch.autograd.Function):
    """See the file's docstring."""

    @staticmethod
    def forward(ctx: Any, by: Products, hidden: Tensor, *parameters: Any) -> Tensor:
        """[N, d], then weight and bias of gate, up and down -> [N, d]."""
        gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = parameters
        gate, up = by.output(hidden, gate_weight, gate_bias), by.output(hidden, up_weight, up_bias)
        ctx.by = by
        ctx.save_for_backward(hidden, gate, up, gate_weight, up_weight, down_weight)
        return by.output(activated(gate, up), down_weight, down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the states, and of weight and bias of gate, up and down."""
        hidden, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        by, needs = ctx.by, ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            silu = F.silu(gate)
            for_down = by.for_weights([gradient], silu * up)[0] if needs[6] else None
            for_down_bias = gradient.sum(0) if needs[7] else None
            of_gate, of_up = activation_gradients(by.for_hidden(gradient, down_weight), silu, gate, up)
            for_hidden = None
            if needs[1]:
                for_hidden = by.for_hidden(of_up, up_weight, by.for_hidden(of_gate, gate_weight))
            for_gate, for_up = by.for_weights([of_gate if needs[2] else None, of_up if needs[4] else None], hidden)
            for_gate_bias, for_up_bias = of_gate.sum(0) if needs[3] else None, of_up.sum(0) if needs[5] else None
            return None, for_hidden, for_gate, for_gate_bias, for_up, for_up_bias, for_down, for_down_bias


class FusedGatedMLP(nn.Module):
    """The first base of a class made from a model's own gated MLP with SiLU."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]. Layers that are more than their weights, such as those of LoRA, are called."""
        layers = [self.gate_proj, self.up_proj, self.down_proj]
        if not all(is_plain(layer) for layer in layers):
            gate, up = self.gate_proj(x), self.up_proj(x)
            return self.down_proj(_Activated.apply(gate, up) if torch.is_grad_enabled() else activated(gate, up))
        device = x.device.type
        parameters: list[Any] = [value for layer in layers for value in (layer.weight, layer.bias)]
        by = products_of(self.gate_proj, x)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, parameters = x.to(dtype), [None if value is None else value.to(dtype) for value in parameters]
        with torch.autocast(device, enabled=False):
            return _GatedMLP.apply(by, x.flatten(0, -2), *parameters).unflatten(0, x.shape[:-1])
