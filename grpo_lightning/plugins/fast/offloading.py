"""Activations kept in main memory between the forward and the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALL = 2**16
"""Elements; what has fewer stays on the device."""


class InMainMemory(saved_tensors_hooks):
    """Moves what the backward pass needs to main memory, and back when it needs it. Values do not change.

    Weights stay where they are, and so do autocast's copies of them: under FSDP2 they are gathered again. On a CPU
    nothing moves.
    """

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        owner = tensor if tensor._base is None else tensor._base
        if tensor.numel() < SMALL or is_weight(owner) or not self.is_elsewhere(tensor):
            return tensor
        return tensor.device, self.take(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, copy = packed
        return copy.to(device, non_blocking=device.type == "cuda")

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """True if the tensor is on a device with memory of its own."""
        return tensor.device.type != "cpu"

    def take(self, tensor: Tensor) -> Tensor:
        """A copy in main memory."""
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda").copy_(tensor)


def is_weight(tensor: Tensor) -> bool:
    """True if it is a weight, or the copy of one in another type."""
    if isinstance(tensor, nn.Parameter):
        return True
    if tensor.grad_fn is None:
        # The copy of a frozen matrix: the states that no trained weight has touched yet have three dimensions.
        return tensor.ndim == 2 and tensor.is_floating_point()
    sources = [getattr(node, "variable", None) for node, _ in tensor.grad_fn.next_functions]
    return any(isinstance(source, nn.Parameter) and source.shape == tensor.shape for source in sources)
