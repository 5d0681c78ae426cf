"""The same runs in whole minibatches, in parts, and on two ranks, for a file that is a program of its ranks too."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import grpo_lightning.training  # noqa: F401  # registers `fsdp2`
from helpers.paths import environment
from helpers.waiting import LIMIT

STRATEGIES = ("ddp", "fsdp2")

Runs = Callable[..., dict[str, Any]]
"""What runs find, from a folder, whether minibatches are cut, and the trainer's options."""


def in_every_way(program: str, folder: Path, runs: Runs) -> dict[str, dict[str, Any]]:
    """What the runs of a file find in whole minibatches, in parts, and on two ranks with ddp and fsdp2."""
    process = subprocess.Popen(
        [sys.executable, program, folder],
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


def as_program(runs: Runs) -> None:
    """The file as a program: its runs on two ranks, into the folder that it is given."""
    torch.set_num_threads(1)
    for strategy in STRATEGIES:
        found = runs(Path(sys.argv[1], strategy), True, devices=2, strategy=strategy)
        if torch.distributed.get_rank() == 0:
            torch.save(found, Path(sys.argv[1], f"{strategy}.pt"))
