"""A process whose memory is watched, and which is killed before it takes more than it may."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 2**30
RESERVE = GIB
"""Bytes that the machine keeps: below, the process is killed whatever it was allowed."""
INTERVAL = 0.2
"""Seconds between two looks."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    returncode: int
    peak: int
    """Most bytes resident at once, of the process and its children."""
    exceeded: bool
    """Whether it was killed for its memory, by `run` or by the system."""


def run(command: Sequence[str], limit: float, environment: Mapping[str, str], log: Path) -> Ended:
    """Runs a command, and kills it with its children when together they have more memory than `limit`.

    Args:
        command: The program and its arguments.
        limit: Bytes.
        environment: Of the process.
        log: File for what it prints.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        peak, exceeded = 0, False
        try:
            while process.poll() is None:
                peak = max(peak, resident(process.pid))
                if peak > limit or psutil.virtual_memory().available < RESERVE:
                    exceeded = True
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(INTERVAL)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return Ended(code, peak, exceeded or code == -signal.SIGKILL)


def resident(pid: int) -> int:
    """Bytes of a process and its children: what they have now, or what the first of them had at most if that is more.

    So that a peak between two looks counts too. 0 if the process is gone.
    """
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return max(sum(one.memory_info().rss for one in family), most_resident(pid))
    except psutil.NoSuchProcess:
        return 0


def most_resident(pid: int) -> int:
    """Most bytes that a process has had resident, where Linux tells; else 0."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(found[0]) if found else 0
