"""Norms and gated MLPs of a model in exchange for ones that compute the same in fewer passes and keep less.

A layer is exchanged where a trial finds that its class computes what the fused one does. Its class becomes one of both.
So its parameters, their names, and what it is an instance of stay as they are.

**Root mean square norms** keep only their input and one factor per token for the backward pass. With x the input, w the
weight, d their width and f = 1 / sqrt(mean(x²) + ε), the output is y = w f x. With g the gradient of y, that of the
weight is sum f g x over tokens, and

    dx = f w g - x f³ / d * sum_j g_j x_j w_j

torch's own `rms_norm` is one kernel on a GPU, and on a CPU several, which keep four tensors.

**Gated MLPs**, y = down(silu(gate(x)) * up(x)), keep x and the outputs of gate and up. What `down` multiplies is made
again from them.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from grpo_lightning.plugins.fast.products import Products, is_plain, products_of


def fuse(model: nn.Module) -> None:
    """Exchanges the layers of `model` that have a fused equal."""
    for layer in model.modules():
        own: Any = type(layer)
        if hasattr(layer, "variance_epsilon"):
            layer.__class__ = fused(own, FusedRMSNorm)
        elif hasattr(layer, "gate_proj") and isinstance(layer.__dict__["_modules"].get("act_fn"), nn.Module):
            activation: Any = type(layer.act_fn)
            layer.__class__ = fused(own, FusedGatedMLP, activation)


@cache
def fused(kind: Any, by: Any, activation: Any = None) -> Any:
    """The class in exchange for `kind`, or `kind` itself where the trial finds a difference."""
    joined = type(f"Fused{kind.__name__}", (by, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
    same = False
    try:
        with torch.random.fork_rng([]), torch.device("cpu"), torch.enable_grad():
            torch.manual_seed(0)
            hidden = torch.randn(3, 6, dtype=torch.float32)
            parts: dict[str, Any] = {"weight": nn.Parameter(hidden[0].clone()), "variance_epsilon": 0.1}
            if by is FusedGatedMLP:
                sizes = {"gate_proj": (6, 9), "up_proj": (6, 9), "down_proj": (9, 6)}
                parts = {name: nn.Linear(*size, dtype=torch.float32) for name, size in sizes.items()}
                parts["act_fn"] = activation()
            same = all(
                torch.allclose(own, other, rtol=1e-4, atol=1e-5)
                for own, other in zip(*(passed(each, parts, hidden) for each in (kind, joined)), strict=True)
            )
    except Exception:  # a class that needs more than these parts is another
        same = False
    return joined if same else kind


def passed(kind: Any, parts: dict[str, Any], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a layer of this class with these attributes, and the gradient of its input."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, part in parts.items():
        setattr(layer, name, part)
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden)
    (gradient,) = torch.autograd.grad(output.square().sum(), hidden)
    return output.detach(), gradient


def normed(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """y [..., d] and f [..., 1], from [..., d] x and [d] w."""
    exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    factor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    factor = factor.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
    output = (exact * factor).to(hidden.dtype)
    return output.mul_(weight) if weight.dtype == hidden.dtype else weight * output, factor


class _RMSNorm(torch.autograd.Function):
    """See the file's docstring."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """[..., d], [d] -> [..., d]; rounded to the type of `hidden` before it is multiplied by the weight."""
        output, factor = normed(hidden, weight, epsilon)
        ctx.save_for_backward(hidden, weight, factor)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of input and weight."""
        hidden, weight, factor = ctx.saved_tensors
        width = len(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            exact = factor.dtype
            rows, of_rows = hidden.to(exact).reshape(-1, width), gradient.to(exact).reshape(-1, width)
            scale, factors = weight.to(exact), factor.view(-1, 1)
            both = of_rows * rows
            for_weight = torch.mv(both.t(), factors[:, 0]) if ctx.needs_input_grad[1] else None
            slope = torch.mv(both, scale)[:, None] * factors**3 / -width
            for_rows = torch.mul(of_rows, scale, out=both).mul_(factors).addcmul_(rows, slope)
        return (
            for_rows.view(hidden.shape).to(hidden.dtype),
            None if for_weight is None else for_weight.to(weight.dtype),
            None,
        )


class FusedRMSNorm(nn.Module):
    """The first base of a class made from a model's own norm, which computes what this one does not take."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        weight = self.weight
        if isinstance(weight, DTensor) or hidden_states.numel() == 0:
            return super().forward(hidden_states)
        if hidden_states.is_cuda and hidden_states.dtype == weight.dtype == torch.float32:
            return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        if not torch.is_grad_enabled():  # Decoding: a function of autograd costs as much as a kernel of few rows.
            return normed(hidden_states, weight, self.variance_epsilon)[0]
        return _RMSNorm.apply(hidden_states, weight, self.variance_epsilon)


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
