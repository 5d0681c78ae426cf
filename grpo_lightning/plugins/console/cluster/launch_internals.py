"""Private names of Lightning 2.6 that runs on several devices rely on."""

import threading
from collections.abc import Mapping
from subprocess import Popen
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

OVERRIDDEN: Mapping[type, tuple[str, ...]] = {
    # FSDP over all devices; Lightning's "auto" shards over nodes alone.
    ModelParallelStrategy: ("_data_parallel_size",),
}


def adopt_ranks() -> list[Popen[Any]]:
    """Takes the ranks that Lightning has started from Lightning's observer, which would end this process by SIGKILL."""
    adopted: list[Popen[Any]] = []
    for thread in threading.enumerate():
        if thread.name == "child-process-observer" and getattr(thread, "_child_processes", None):
            adopted += thread._child_processes  # type: ignore[attr-defined]
            thread._child_processes = []  # type: ignore[attr-defined]
    return adopted
