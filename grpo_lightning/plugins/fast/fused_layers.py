"""Norms and gated MLPs of a model in exchange for ones that compute the same in fewer passes and keep less.

A layer is exchanged where a trial finds that its class computes what the fused one does. Its class becomes one of both.
So its parameters, their names, and what it is an instance of stay as they are.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.plugins.fast.gated_mlp import FusedGatedMLP
from grpo_lightning.plugins.fast.rms_norm import FusedRMSNorm

WIDTH = 6


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
            parts = norm_parts() if by is FusedRMSNorm else mlp_parts(activation)
            hidden = torch.randn(3, WIDTH, dtype=torch.float32)
            same = all(
                torch.allclose(own, other, rtol=1e-4, atol=1e-5)
                for own, other in zip(*(passed(each, parts, hidden) for each in (kind, joined)), strict=True)
            )
    except Exception:  # a class that needs more than these parts is another
        same = False
    return joined if same else kind


def norm_parts() -> dict[str, Any]:
    """The attributes of a small norm."""
    return {"weight": nn.Parameter(torch.randn(WIDTH, dtype=torch.float32)), "variance_epsilon": 0.1}


def mlp_parts(activation: Any) -> dict[str, Any]:
    """The attributes of a small gated MLP."""
    into, out = [nn.Linear(WIDTH, 9, dtype=torch.float32) for _ in range(2)], nn.Linear(9, WIDTH, dtype=torch.float32)
    return {"gate_proj": into[0], "up_proj": into[1], "down_proj": out, "act_fn": activation()}


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
