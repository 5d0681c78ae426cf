"""The policy's weights as a checkpoint names them, one after another: what an engine with weights of its own reads."""

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

LAYER = re.compile(r"^.*?\.\d+\.")  # the beginning of a weight's name that the other weights of its layer have, too


@torch.no_grad()
def named_weights(policy: Policy, tied_head: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every weight and saved buffer, layer after layer, without gradient.

    Sharded weights are assembled one at a time, or layer by layer where transformers stores them in other shapes than
    a checkpoint: every rank must read to the end. What an adapter computes is added to the weight of its layer. A head
    that is the embedding's tensor is named too, unless `tied_head` is False.
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
        once = {id(weight): name for name, weight in reversed(state.items())}
        state = {name: weight for name, weight in state.items() if once[id(weight)] == name}
    nothing: dict[str, Tensor] = {}
    converts = revert_weight_conversion(model, nothing) is not nothing
    for _, names in groupby(state, key=LAYER.findall if converts else None):
        part = {}
        for name in names:
            weight = assembled(state[name].detach())
            part[name] = plus_adapter(weight, adapted[name]) if name in adapted else weight
        yield from (revert_weight_conversion(model, part) if converts else part).items()


def plus_adapter(weight: Tensor, layer: Any) -> Tensor:
    """W + s B A for a whole W of [out, in] and its `layer` of `adapted_layers`. Every rank must call it."""
    if getattr(layer, "lora_variant", True) or not weight.is_floating_point():
        raise UsageError(
            "model.policy.adapter: this engine has weights of its own, and takes LoRA without dora. Use "
            "model.engine=NativeEngine, or leave it out"
        )
    (name,) = layer.lora_A
    added = assembled(layer.lora_B[name].weight) @ assembled(layer.lora_A[name].weight)
    added = (added.T if layer.fan_in_fan_out else added) * layer.scaling[name]
    return (weight.float() + added).to(weight.dtype)
