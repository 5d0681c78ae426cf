"""Runs that are made in this process and, with two strategies, by a script on two ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.paths import TESTS, environment
from helpers.waiting import LIMIT

Runs = Callable[..., dict[str, Any]]
"""`runs(folder, parts, devices=1, strategy=...)` of a script: what each of its runs found, whole or in parts."""

STRATEGIES = ("ddp", "fsdp2")


def in_every_way(script: str, runs: Runs, folder: Path) -> dict[str, dict[str, Any]]:
    """What the runs find in whole minibatches, in parts, and on two ranks with ddp and fsdp2.

    Args:
        script: File in tests/helpers whose main is `on_two_ranks`.
        runs: Its runs.
        folder: Where they are made.
    """
    process = subprocess.Popen(
        [sys.executable, TESTS / "helpers" / script, folder],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(OMP_WAIT_POLICY="PASSIVE"),
    )
    try:
        here = {name: runs(folder / name, parts) for name, parts in (("whole", False), ("parts", True))}
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, errors[-3000:]
    finally:
        with process:  # it is waited for: else a later test is blamed for an unclosed process
            process.kill()
    return here | {strategy: torch.load(folder / f"{strategy}.pt") for strategy in STRATEGIES}


def on_two_ranks(runs: Runs) -> None:
    """The main of a script: makes its runs in parts with both strategies, and saves what they found."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for strategy in STRATEGIES:
        found = runs(folder / strategy, True, devices=2, strategy=strategy)
        if torch.distributed.get_rank() == 0:
            torch.save(found, folder / f"{strategy}.pt")
