"""Norms and gated MLPs of a model in exchange for ones that compute the same in fewer passes and keep less.

A layer is exchanged where a trial finds that its class computes what the fused one does. Its class becomes one of both.
So its parameters, their names, and what it is an instance of stay as they are.

**Root mean square norms** keep only their input and one factor per token for the backward pass. With x the input, w the
weight, d their width and f = 1 / sqrt(mean(x²) + ε), the output is y = w f x. With g the gradient of y, that of the
weight is sum f g x over tokens, and

    dx = f w g - x f³ / d * sum_j g_j x_j w_j

torch's own `rms_norm` is one kernel on a GPU, and on a CPU several, which keep four tensors.

**Gated MLPs**, y = down(silu(gate(x)) * up(x)), do not keep silu(gate(x)), which is made again from gate(x).
"""

from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


def fuse(model: nn.Module) -> None:
    """Exchanges the layers of `model` that have a fused equal."""
    for layer in model.modules():
        own: Any = type(layer)
        if isinstance(layer, FusedRMSNorm | FusedGatedMLP):
            continue
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
    # A class that needs more than these parts fails, and is another.
    with suppress(Exception), torch.random.fork_rng([]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(0)
        hidden = torch.randn(3, 6, dtype=torch.float32)
        parts: dict[str, Any] = {"weight": nn.Parameter(hidden[0].clone()), "variance_epsilon": 0.1}
        if by is FusedGatedMLP:
            sizes = {"gate_proj": (6, 9), "up_proj": (6, 9), "down_proj": (9, 6)}
            parts = {name: nn.Linear(*size, dtype=torch.float32) for name, size in sizes.items()}
            parts["act_fn"] = activation()
        both = zip(*(passed(each, parts, hidden) for each in (kind, joined)), strict=True)
        same = all(torch.allclose(own, other, rtol=1e-4, atol=1e-5) for own, other in both)
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
        weight = self.weight
        if isinstance(weight, DTensor) or hidden_states.numel() == 0:
            return super().forward(hidden_states)
        if hidden_states.is_cuda and hidden_states.dtype == weight.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        if not torch.is_grad_enabled():  # Decoding: a function of autograd costs as much as a kernel of few rows.
            return normed(hidden_states, weight, self.variance_epsilon)[0]
        return _RMSNorm.apply(hidden_states, weight, self.variance_epsilon)


class _Activated(torch.autograd.Function):
    """silu(gate) * up, which keeps gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        for_up = F.silu(gate).mul_(gradient)
        gradient = gradient * up
        return torch.ops.aten.silu_backward.grad_input(gradient, gate, grad_input=gradient), for_up


class FusedGatedMLP(nn.Module):
    """The first base of a class made from a model's own gated MLP with SiLU."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(_Activated.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up))
