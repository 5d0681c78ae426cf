"""What the ranks of a run tell each other, where Lightning has no function for it."""

import random
from typing import TypeVar

import numpy
import torch.distributed

T = TypeVar("T")


def rank() -> int:
    """The index of this process among all of the run, from 0."""
    return torch.distributed.get_rank() if _together() else 0


def world_size() -> int:
    """The number of processes of the run."""
    return torch.distributed.get_world_size() if _together() else 1


def gather(value: T, group: object = None) -> list[T]:
    """The value of every rank, in their order. Every rank must call it. torchmetrics gives a `group`: that of all."""
    everyone = [value] * world_size()
    if _together():
        torch.distributed.all_gather_object(everyone, value)
    return everyone


def seed(*key: int) -> None:
    """Seeds the global random generators of this rank, each rank's otherwise."""
    own = hash((*key, rank()))
    torch.manual_seed(own)
    random.seed(own)
    numpy.random.seed(own % 2**32)


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
