"""A script whose runs are made in this process and, by two strategies, on two ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.paths import TESTS, environment
from helpers.waiting import LIMIT

Runs = Callable[..., dict[str, dict[str, Any]]]
"""`runs(folder, max_tokens, devices=1, strategy=...)` of a script: what each of its runs found."""


def in_every_way(script: str, runs: Runs, folder: Path, max_tokens: int) -> dict[str, dict[str, Any]]:
    """What the runs find in whole minibatches, in parts of `max_tokens`, and on two ranks with ddp and fsdp2.

    Args:
        script: File in tests/helpers whose main is `on_two_ranks`.
        runs: Its runs.
        folder: Where they are made.
        max_tokens: Of a part.
    """
    processes = {
        strategy: subprocess.Popen(
            [sys.executable, TESTS / "helpers" / script, strategy, folder],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(OMP_WAIT_POLICY="PASSIVE"),
        )
        for strategy in ("ddp", "fsdp2")
    }
    try:
        here = {name: runs(folder / name, tokens) for name, tokens in (("whole", 0), ("parts", max_tokens))}
        for strategy, process in processes.items():
            _, errors = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, f"{strategy}: {errors[-3000:]}"
    finally:
        for process in processes.values():
            with process:  # it is waited for: else a later test is blamed for an unclosed process
                process.kill()
    return here | {strategy: torch.load(folder / f"{strategy}.pt") for strategy in processes}


def on_two_ranks(runs: Runs, max_tokens: int) -> None:
    """The main of a script: makes its runs as the command line says, and saves what they found."""
    strategy, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    found = runs(folder / strategy, max_tokens=max_tokens, devices=2, strategy=strategy)
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / f"{strategy}.pt")
