"""The policy's weights by the names of a checkpoint, for engines that hold copies of the weights."""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from grpo_lightning.policy.adapter import adapted_layers
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.sharding import assembled
from grpo_lightning.types import UsageError

LAYER = re.compile(r"^.*?\.\d+\.")
"""The beginning of a weight's name, which all weights of its layer have in common."""


@torch.no_grad()
def named_weights(policy: Policy, tied_head: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields name and full tensor of every weight and saved buffer, layer after layer, without gradient.

    Sharded weights are assembled one at a time, or layer by layer if transformers stores them in other shapes than a
    checkpoint. So every rank must read to the end. An adapter's product is added to the weight of its layer.

    Args:
        policy: The policy, with or without an adapter.
        tied_head: Name the head too if its tensor is the embedding's.
    """
    model = policy.model
    state = model.state_dict(keep_vars=True)
    adapted: dict[str, Any] = {}
    if policy.adapter is not None:
        for path, layer in adapted_layers(model).items():
            adapted[f"{path}.weight"] = layer
            for name in layer.state_dict():
                if not name.startswith("base_layer."):
                    del state[f"{path}.{name}"]
        state = {name.replace(".base_layer.", "."): weight for name, weight in state.items()}
    if not tied_head:
        first_name = {id(weight): name for name, weight in reversed(state.items())}
        state = {name: weight for name, weight in state.items() if first_name[id(weight)] == name}
    # transformers returns its argument itself where it has nothing to convert.
    empty: dict[str, Tensor] = {}
    converts = revert_weight_conversion(model, empty) is not empty
    for _, names in groupby(state, key=LAYER.findall if converts else None):
        weights = {}
        for name in names:
            weight = assembled(state[name].detach())
            weights[name] = plus_adapter(weight, adapted[name]) if name in adapted else weight
        yield from (revert_weight_conversion(model, weights) if converts else weights).items()


def plus_adapter(weight: Tensor, layer: Any) -> Tensor:
    """[out, in] full W -> [out, in] W + s B A, with A, B and s from `layer`. Every rank must call it."""
    if getattr(layer, "lora_variant", True) or not weight.is_floating_point():
        raise UsageError(
            "model.policy.adapter: this engine has weights of its own, and takes LoRA without dora. Use "
            "model.engine=NativeEngine, or leave it out"
        )
    (name,) = layer.lora_A
    product = assembled(layer.lora_B[name].weight) @ assembled(layer.lora_A[name].weight)
    change = (product.T if layer.fan_in_fan_out else product) * layer.scaling[name]
    return (weight.float() + change).to(weight.dtype)
