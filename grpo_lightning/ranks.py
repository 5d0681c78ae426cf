"""What the ranks of a run tell each other, where Lightning has no word for it."""

from collections.abc import Iterable
from typing import TypeVar

import torch.distributed
from torch import Tensor

T = TypeVar("T")


def rank() -> int:
    """The number of this process, from 0."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    return torch.distributed.get_rank()


def gather(value: T) -> list[T]:
    """The value of every rank, in their order. Every rank must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    everyone = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Gives every rank the values of rank 0, in place. Every rank must call it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), src=0)
