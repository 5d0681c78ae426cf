"""What the ranks of a run tell each other, where Lightning has no function for it."""

from collections.abc import Iterable
from typing import TypeVar

import torch.distributed
from torch import Tensor

T = TypeVar("T")


def rank() -> int:
    """The index of this process among all of the run, from 0."""
    return torch.distributed.get_rank() if _together() else 0


def world_size() -> int:
    """The number of processes of the run."""
    return torch.distributed.get_world_size() if _together() else 1


def gather(value: T) -> list[T]:
    """The value of every rank, in their order. Every rank must call it."""
    if not _together():
        return [value]
    everyone = [value] * world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Gives every rank the values of rank 0, in place. Every rank must call it."""
    if _together():
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), src=0)


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
