"""The policy's weights as a checkpoint names them, one after another: what an engine with weights of its own reads."""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from grpo_lightning.policy.adapter import adapted_layers, plus_adapter
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.sharding import assembled

BASE = "base_layer."
"""How PEFT begins the names of the weights beneath an adapter."""

_LAYER = re.compile(r"(.*?\.\d+)\.")


@torch.no_grad()
def named_weights(policy: Policy, tied_head: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every weight and saved buffer, layer after layer, without gradient.

    Sharded weights are assembled one at a time: every rank must read to the end. An architecture whose weights
    transformers stores in other shapes than its checkpoints has one layer assembled at a time. What an adapter computes
    is added to the weight of its layer.

    Args:
        policy: Of whatever strategy, in whatever precision.
        tied_head: Whether a head that is the embedding's tensor is named, too.

    Raises:
        UsageError: The adapter cannot be added to weights.
    """
    model = policy.model
    state = model.state_dict(keep_vars=True)
    adapted: dict[str, Any] = {}
    if policy.adapter is not None:
        layers = adapted_layers(model)
        adapted = {f"{path}.weight": layer for path, layer in layers.items()}
        state = _without_adapter(state, layers)
    if not tied_head:
        once = {id(weight): name for name, weight in reversed(state.items())}
        state = {name: weight for name, weight in state.items() if once[id(weight)] == name}
    nothing: dict[str, Tensor] = {}
    # Without conversions it returns what it was given.
    converts = revert_weight_conversion(model, nothing) is not nothing
    for _, names in groupby(state, key=_layer_of if converts else None):
        part = {}
        for name in names:
            weight = assembled(state[name].detach())
            part[name] = plus_adapter(weight, adapted[name]) if name in adapted else weight
        yield from (revert_weight_conversion(model, part) if converts else part).items()


def _without_adapter(state: Mapping[str, Tensor], layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state with the names that the layers had before the adapter was added."""
    added = {
        f"{path}.{name}" for path, layer in layers.items() for name in layer.state_dict() if not name.startswith(BASE)
    }
    return {name.replace(f".{BASE}", "."): weight for name, weight in state.items() if name not in added}


def _layer_of(name: str) -> str:
    """The beginning of a weight's name that the other weights of its layer have, too; else empty."""
    found = _LAYER.match(name)
    return found[1] if found else ""
