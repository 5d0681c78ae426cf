"""Communication between the ranks of a run, where Lightning has no function for it."""

import random
from typing import TypeVar

import numpy
import torch.distributed

T = TypeVar("T")


def rank() -> int:
    """Returns the index of this process among all processes of the run, from 0."""
    return torch.distributed.get_rank() if _together() else 0


def world_size() -> int:
    """Returns the number of processes of the run."""
    return torch.distributed.get_world_size() if _together() else 1


def gather(value: T, group: object = None) -> list[T]:
    """Returns the value of every rank, by rank. Every rank must call it.

    torchmetrics passes a `group`, which holds all ranks and is not read.
    """
    value_by_rank = [value] * world_size()
    if _together():
        torch.distributed.all_gather_object(value_by_rank, value)
    return value_by_rank


def seed(*key: int) -> None:
    """Seeds the global random generators of this rank, differently on each rank."""
    rank_seed = hash((*key, rank()))
    torch.manual_seed(rank_seed)
    random.seed(rank_seed)
    numpy.random.seed(rank_seed % 2**32)  # numpy takes 32 bits


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
