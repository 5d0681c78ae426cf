"""What the ranks of a run tell each other, where Lightning has no word for it."""

from typing import TypeVar

import torch.distributed

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """The value of every rank, in their order. Every rank must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    everyone = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone
