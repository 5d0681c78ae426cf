"""Threads on a CPU, each of which decodes some of the completions, or learns from some of the micro-batches.

A pass of a small model is hundreds of small operations. When cores share an operation, each of them waits for the
slowest core. When threads share the completions, they wait only at the end.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def divided(groups: Sequence[Sequence[int]], num_shares: int) -> list[list[Sequence[int]]]:
    """Deals the groups out to at most `num_shares` lists of about equal numbers of rows.

    The longest prompts come first, so neighbours go to different shares. Groups that cannot be dealt out evenly are
    divided themselves.
    """
    num_whole = len(groups) // num_shares * num_shares
    shares = [[*groups[index:num_whole:num_shares]] for index in range(num_shares)]
    for group in groups[num_whole:]:
        for index, share in enumerate(shares):
            if rows := group[index::num_shares]:
                share.append(rows)
    return [share for share in shares if share]


def in_threads(tasks: Sequence[Callable[[], T]], pool: Executor | None = None) -> list[T]:
    """Runs each task in a thread with an equal part of torch's threads, and returns their results in order.

    Gradients, autocast and inference mode are on or off as outside. The first error is raised when all have ended.

    Args:
        tasks: Functions without arguments.
        pool: Threads to use, which stay for the next call. None makes new threads, which end with this call.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    num_threads = torch.get_num_threads()
    has_inference = torch.is_inference_mode_enabled()
    has_gradients = torch.is_grad_enabled()
    has_autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")

    def run(task: Callable[[], T]) -> T:
        torch.set_num_threads(max(1, num_threads // len(tasks)))
        with (
            torch.inference_mode(has_inference),
            torch.set_grad_enabled(has_gradients),
            torch.autocast("cpu", dtype, enabled=has_autocast),
        ):
            return task()

    try:
        with ThreadPoolExecutor(len(tasks)) if pool is None else nullcontext(pool) as executor:
            return list(executor.map(run, tasks))
    finally:
        # The number is each thread's own, but new threads begin with the number that was set last.
        torch.set_num_threads(num_threads)
