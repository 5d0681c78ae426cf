"""Layers of a model in exchange for ones that compute the same in fewer passes and keep less.

A layer is exchanged if its code is Llama's, as that of most models is. Its class becomes one of both. So its
parameters, their names, and what it is an instance of stay as they are.
"""

import types
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama

from grpo_lightning.plugins.fast import rotary
from grpo_lightning.plugins.fast.gated_mlp import FusedGatedMLP
from grpo_lightning.plugins.fast.rms_norm import FusedRMSNorm

ROTATION = "apply_rotary_pos_emb"


def fuse(model: nn.Module) -> None:
    """Exchanges the norms, the gated MLPs and the rotary embeddings of `model` that are written as Llama's are."""
    for layer in model.modules():
        own: Any = type(layer)
        activation: Any = type(getattr(layer, "act_fn", None))
        kind = fused(own, activation)
        if kind is not own:
            layer.__class__ = kind


@cache
def fused(kind: Any, activation: Any) -> Any:
    """The class in exchange for `kind`, or `kind` itself."""
    if same_code(kind.forward, llama.LlamaRMSNorm.forward):
        return _joined(FusedRMSNorm, kind)
    if same_code(kind.forward, llama.LlamaMLP.forward) and activation in (SiLUActivation, nn.SiLU):
        return _joined(FusedGatedMLP, kind)
    if _rotates_as_llama(kind.forward):
        return _joined(_with_own_rotation(kind.forward), kind)
    return kind


def same_code(function: Any, other: Any) -> bool:
    """Whether two functions are written the same, up to the names of their variables and their notes on types."""
    codes = [each.__code__ for each in (function, other) if isinstance(each, types.FunctionType)]
    return len(codes) == 2 and len({(code.co_code, code.co_consts, code.co_names) for code in codes}) == 1


def _rotates_as_llama(forward: Any) -> bool:
    names = getattr(forward, "__globals__", {})
    return (
        isinstance(forward, types.FunctionType)
        and ROTATION in forward.__code__.co_names
        and same_code(names.get(ROTATION), llama.apply_rotary_pos_emb)
        and same_code(names.get("rotate_half"), llama.rotate_half)
    )


def _with_own_rotation(forward: Callable[..., Any]) -> type:
    """A class whose `forward` is a copy of this one that finds our rotation under the name of the library's."""
    names = forward.__globals__ | {ROTATION: rotary.apply_rotary_pos_emb}
    copy = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__, copy.__doc__ = forward.__kwdefaults__, forward.__doc__
    return type("Rotating", (nn.Module,), {"forward": copy})


def _joined(first: type, kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{kind.__name__}", (first, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
