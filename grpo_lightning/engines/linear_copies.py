"""Copies of a model's linear layers for decoding: in the layout that few rows read fastest, or in fewer bytes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_lightning.policy.policy import Policy, trunk_of
from grpo_lightning.policy.products import OneDNNLinear

ROWS = 16
"""Rows that a layout is made for. Others work too: oneDNN chooses the same layout from 2 rows to thousands."""

Forward = Callable[[Tensor], Tensor]


class LinearCopies:
    """The weights of a policy's linear layers as they are now, which `in_use` computes with.

    They do not follow the policy: make them again after every update. Layers of other kinds, such as quantised ones and
    the experts of a mixture, keep their own weights. A head tied to the embedding is copied, the embedding is not.

    On a CPU the copies are packed for oneDNN. Its products of few rows take a third of the time of MKL's on AMD's
    processors, and differ by rounding. Elsewhere only another type makes a copy. Layers that read the same states, such
    as those of queries, keys and values, have one copy and one product together.

    Args:
        policy: With whole weights.
        dtype: Type of the copies and of the products.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._forwards: dict[nn.Module, Forward] = {}
        self._joined: list[_Joined] = []
        for layers in _siblings(policy.model):
            forward = _forward(layers, dtype)
            if forward and len(layers) == 1:
                self._forwards[layers[0]] = forward
            elif forward:
                joined = _Joined(forward, [_weight(layer).shape[0] for layer in layers])
                self._joined.append(joined)
                self._forwards |= {layer: partial(joined, index) for index, layer in enumerate(layers)}

    def __len__(self) -> int:
        """Layers that have a copy."""
        return len(self._forwards)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The layers compute with their copies inside."""
        for layer, forward in self._forwards.items():
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in self._forwards:
                del layer.__dict__["forward"]
            for joined in self._joined:
                joined.forget()


def linear_layers(model: PreTrainedModel) -> list[Any]:
    """The linear layers of the transformer and its head."""
    layers = [*trunk_of(model).modules(), model.get_output_embeddings()]
    return [layer for layer in layers if type(layer) in (nn.Linear, OneDNNLinear, Conv1D)]


def numbers_in_copies(model: PreTrainedModel) -> int:
    """Elements of the weights that are copied."""
    return sum(layer.weight.numel() for layer in linear_layers(model))


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same states, in most models."""


def _siblings(model: PreTrainedModel) -> list[list[Any]]:
    """The linear layers, those that probably read the same states together; beneath an adapter too."""
    kin = {name: names for names in SIBLINGS for name in names}
    found: dict[object, list[Any]] = {}
    names = {module: name.split(".") for name, module in model.named_modules()}
    for layer in dict.fromkeys(linear_layers(model)):
        *parents, name = names[layer]
        beneath = name == "base_layer"
        if beneath:
            *parents, name = parents
        shape = type(layer), _weight(layer).shape[1], _weight(layer).dtype, beneath
        found.setdefault((*parents, kin[name], *shape) if name in kin else layer, []).append(layer)
    return list(found.values())


class _Joined(threading.local):
    """One product for several layers. Those called with other states than the first are computed again.

    Each thread has states of its own.

    Args:
        forward: The product of all layers.
        sizes: Outputs of each layer.
    """

    def __init__(self, forward: Forward, sizes: list[int]) -> None:
        self.forward = forward
        self.sizes = sizes
        self.hidden: Tensor | None = None
        self.version = 0
        self.outputs: dict[int, Tensor] = {}

    def __call__(self, index: int, hidden: Tensor) -> Tensor:
        """What the layer at `index` makes of `hidden`."""
        # Tensors of inference mode have no version.
        version = 0 if hidden.is_inference() else hidden._version
        if self.hidden is not hidden or self.version != version or index not in self.outputs:
            self.hidden, self.version = hidden, version
            self.outputs = dict(enumerate(self.forward(hidden).split(self.sizes, -1)))
        output = self.outputs.pop(index)
        if not self.outputs:
            self.forget()
        return output

    def forget(self) -> None:
        """Frees the states and what was made of them."""
        self.hidden = None
        self.outputs = {}


def _weight(layer: Any) -> Tensor:
    """[outputs, inputs]; Conv1D is a linear layer whose weight is transposed."""
    weight: Tensor = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight


@torch.no_grad()
def _forward(layers: list[Any], dtype: torch.dtype) -> Forward | None:
    """What computes as `layers` do, end to end, from a copy of their weights; None if a copy would be no better."""
    weights = [_weight(layer) for layer in layers]
    packs = weights[0].device.type == "cpu" and dtype in _packed_types()
    if not packs and weights[0].dtype == dtype:
        return None
    weight = torch.cat([one.to(dtype) for one in weights]) if len(weights) > 1 else weights[0].to(dtype)
    bias = None
    if any(layer.bias is not None for layer in layers):
        each = zip(layers, weights, strict=True)
        biases = [one.new_zeros(len(one)) if layer.bias is None else layer.bias.detach() for layer, one in each]
        bias = torch.cat(biases).to(dtype)
    if packs:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        return partial(_packed, dtype, packed, bias)
    return partial(_plain, dtype, weight, bias)


def _packed_types() -> set[torch.dtype]:
    """Types that oneDNN multiplies fast on this machine."""
    if not torch.backends.mkldnn.is_available():
        return set()
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return {torch.float32, torch.bfloat16} if fast else {torch.float32}


def _packed(dtype: torch.dtype, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
    output = torch.ops.mkldnn._linear_pointwise(hidden.to(dtype), weight, bias, "none", [], "")
    return _as_outside(output, hidden)


def _plain(dtype: torch.dtype, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
    return _as_outside(nn.functional.linear(hidden.to(dtype), weight, bias), hidden)


def _as_outside(output: Tensor, hidden: Tensor) -> Tensor:
    """The output in the type that the rest of the model computes in."""
    return output if torch.is_autocast_enabled(hidden.device.type) else output.to(hidden.dtype)
