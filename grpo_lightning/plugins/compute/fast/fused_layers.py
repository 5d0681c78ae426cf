"""Fused norms and gated MLPs, which compute the same as a model's in fewer passes and keep less memory.

A layer becomes fused if a trial finds that its class and the fused class compute the same. Then it gets a class that
inherits from both. So its parameters, their names, and what it is an instance of stay as they are.

**Root mean square norms** keep only their input and one factor per token for the backward pass. With x the input, w the
weight, d their width and f = 1 / sqrt(mean(x²) + ε), the output is y = w f x. With g the gradient of y, the gradient
of the weight is sum f g x over tokens, and

    dx = f w g - x f³ / d * sum_j g_j x_j w_j

torch's `rms_norm` is one kernel on a GPU. On a CPU it is several kernels, which keep four tensors.

**Gated MLPs**, y = down(silu(gate(x)) * up(x)), do not keep silu(gate(x)). They compute it again from gate(x).
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
    """Fuses the layers of `model` whose fused class computes the same."""
    for layer in model.modules():
        kind: Any = type(layer)
        if isinstance(layer, FusedRMSNorm | FusedGatedMLP):
            continue
        if hasattr(layer, "variance_epsilon"):
            layer.__class__ = fused(kind, FusedRMSNorm)
        elif hasattr(layer, "gate_proj") and isinstance(layer.__dict__["_modules"].get("act_fn"), nn.Module):
            activation: Any = type(layer.act_fn)
            layer.__class__ = fused(kind, FusedGatedMLP, activation)


@cache
def fused(kind: Any, base: Any, activation: Any = None) -> Any:
    """Returns a class that inherits from `base` and `kind`, or `kind` itself if a trial finds a difference."""
    joined = type(f"Fused{kind.__name__}", (base, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
    # A class that needs more attributes than these fails here, and is not fused.
    with suppress(Exception), torch.random.fork_rng([]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(0)
        hidden = torch.randn(3, 6, dtype=torch.float32)
        attributes: dict[str, Any] = {"weight": nn.Parameter(hidden[0].clone()), "variance_epsilon": 0.1}
        if base is FusedGatedMLP:
            sizes = {"gate_proj": (6, 9), "up_proj": (6, 9), "down_proj": (9, 6)}
            attributes = {name: nn.Linear(*size, dtype=torch.float32) for name, size in sizes.items()}
            attributes["act_fn"] = activation()
        pairs = zip(*(trial_of(tried, attributes, hidden) for tried in (kind, joined)), strict=True)
        if all(torch.allclose(expected, actual, rtol=1e-4, atol=1e-5) for expected, actual in pairs):
            return joined
    return kind


def trial_of(kind: Any, attributes: dict[str, Any], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output of a layer of class `kind` with these attributes, and a gradient of its input."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden)
    (gradient,) = torch.autograd.grad(output.square().sum(), hidden)
    return output.detach(), gradient


def normed(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """[..., d] x, [d] w, ε -> [..., d] y and [..., 1] f of the file's docstring."""
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
            x = hidden.to(exact).reshape(-1, width)
            g = gradient.to(exact).reshape(-1, width)
            w = weight.to(exact)
            f = factor.view(-1, 1)
            product = g * x
            weight_gradient = torch.mv(product.t(), f[:, 0]) if ctx.needs_input_grad[1] else None
            slope = torch.mv(product, w)[:, None] * f**3 / -width
            # The product has been read: dx = f w g + slope x takes its memory.
            dx = torch.mul(g, w, out=product).mul_(f).addcmul_(x, slope)
        return (
            dx.view(hidden.shape).to(hidden.dtype),
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
        )


class FusedRMSNorm(nn.Module):
    """The first base of a fused norm. The second is the model's norm, for what this class does not compute."""

    weight: Tensor
    """[d] w, the factors of the output."""
    variance_epsilon: float
    """ε, added to the mean square."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor) or hidden_states.numel() == 0:
            return super().forward(hidden_states)
        if hidden_states.is_cuda and hidden_states.dtype == weight.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        # In decoding a function of autograd would cost as much as a kernel over few rows.
        if not torch.is_grad_enabled():
            return normed(hidden_states, weight, self.variance_epsilon)[0]
        return _RMSNorm.apply(hidden_states, weight, self.variance_epsilon)


class _Activated(torch.autograd.Function):
    """silu(gate) * up. For the backward pass it keeps only gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        up_gradient = F.silu(gate).mul_(gradient)
        gradient = gradient * up
        return torch.ops.aten.silu_backward.grad_input(gradient, gate, grad_input=gradient), up_gradient


class FusedGatedMLP(nn.Module):
    """The first base of a fused gated MLP with SiLU. The second is the model's MLP, which keeps the layers."""

    gate_proj: nn.Linear
    """The layer whose output SiLU is applied to."""
    up_proj: nn.Linear
    """The layer whose output is multiplied by the gate."""
    down_proj: nn.Linear
    """The layer from the product back to the states."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        return self.down_proj(_Activated.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up))
