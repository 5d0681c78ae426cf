"""A worker process as its pool sees it, and the outcome of a task."""

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from grpo_lightning.types import Status

SCRIPT = Path(__file__).with_name("main.py")
IDLE, LOADING = -1, -2
LOAD_SECONDS = 120.0  # that a worker may take to import its function


@dataclass(slots=True)
class Outcome:
    """The outcome of one task."""

    status: str  # `ok`, `error` (it raised), `timeout`, `memory` (over the limit) or `crash` (it ended two workers)
    value: Any = None  # what the function returned, if the status is `ok`
    error: str = ""  # line, type and message of the exception, if the status is `error`

    @classmethod
    def of_reply(cls, line: bytes, number: int) -> "Outcome":
        """The outcome that a process tells in a line. Raises ValueError unless it answers the request `number`."""
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            reply = json.loads(line)
            if reply["number"] == number:
                return cls(reply["status"], reply.get("value"), reply.get("error", ""))
        raise ValueError(f"no answer to request {number}: {line[:200]!r}")


def environment() -> dict[str, str]:
    """The variables of a process: sets have the same order in every process and every run."""
    own = {"SYMPY_GROUND_TYPES": "python", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return os.environ | own


class Worker:
    """One process and its job: the index of a task, IDLE or LOADING."""

    def __init__(self, timeout: float, memory_limit_mb: int, cpu_seconds: float | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(memory_limit_mb), str(timeout), str(cpu_seconds or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,  # a group of its own: kill() reaches child processes, Ctrl-C does not
        )
        self.function = ""  # the one that it has, or is loading
        self.loaded = Outcome(Status.OK)  # of loading it
        self.job = IDLE
        self.number = 0  # that of the last request
        self.deadline = math.inf
        self.unread = b""

    def fileno(self) -> int:
        """The descriptor on which answers come."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def load(self, function: str) -> None:
        """Lets the worker import a function."""
        self.function = function
        self.send(LOADING, {"load": function, "path": sys.path}, LOAD_SECONDS)

    def send(self, job: int, request: dict[str, Any], seconds: float) -> None:
        """Gives the worker a job. That a worker is dead is noticed when its answer is read."""
        assert self.process.stdin is not None
        self.job = job
        self.number += 1
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request | {"number": self.number}, default=str).encode() + b"\n")
            self.process.stdin.flush()
        self.deadline = monotonic() + seconds

    def receive(self) -> Outcome | None:
        """The answer; None while it is incomplete.

        Raises:
            EOFError: The worker has ended. One whose answer is not to this job is killed.
        """
        chunk = os.read(self.fileno(), 1 << 16)
        if not chunk:
            raise EOFError
        self.unread += chunk
        if not self.unread.endswith(b"\n"):
            return None
        line, self.unread = self.unread, b""
        try:
            return Outcome.of_reply(line, self.number)
        except ValueError:
            self.kill()
            raise EOFError from None

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        with contextlib.suppress(BrokenPipeError), self.process:  # closes the pipes, and waits
            self.process.terminate()  # it kills the worker, and cleans up
