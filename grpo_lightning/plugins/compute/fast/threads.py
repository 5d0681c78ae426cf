"""Threads that decode or learn from a part of the completions each, on a CPU.

A pass of a small model is hundreds of small operations. Divided among the cores, each of them waits for its slowest
part. Completions divided among threads wait only at the end.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def divided(groups: Sequence[Sequence[int]], parts: int) -> list[list[Sequence[int]]]:
    """The groups in at most `parts` parts of about as many rows; neighbours go to different parts.

    The longest prompts come first. Groups that cannot be dealt out evenly are divided themselves.
    """
    whole = len(groups) // parts * parts
    dealt = [[*groups[part:whole:parts]] for part in range(parts)]
    for group in groups[whole:]:
        for part, own in enumerate(dealt):
            if rows := group[part::parts]:
                own.append(rows)
    return [part for part in dealt if part]


def in_threads(work: Sequence[Callable[[], T]], pool: Executor | None = None) -> list[T]:
    """The results of the pieces of work; each has a thread of its own and an equal part of torch's threads.

    Gradients, autocast and inference mode are on or off as outside. The first error is raised when all have ended. The
    threads of `pool` are kept for the next call; without it new ones end with this one.
    """
    if len(work) == 1:
        return [work[0]()]
    threads = torch.get_num_threads()
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run(piece: Callable[[], T]) -> T:
        torch.set_num_threads(max(1, threads // len(work)))
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            torch.autocast("cpu", dtype, enabled=autocast),
        ):
            return piece()

    try:
        with ThreadPoolExecutor(len(work)) if pool is None else nullcontext(pool) as threads_of_work:
            return list(threads_of_work.map(run, work))
    finally:
        torch.set_num_threads(threads)  # It is each thread's own, but new threads begin with the last one that was set.
