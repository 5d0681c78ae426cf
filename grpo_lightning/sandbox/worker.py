"""A worker process as its pool sees it, and the outcome of a task."""

import contextlib
import json
import math
import os
import socket
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
        """The outcome that a process tells in a line. Raises EOFError unless it answers the request `number`."""
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            reply = json.loads(line)
            if reply["number"] == number:
                return cls(reply["status"], reply.get("value"), reply.get("error", ""))
        raise EOFError(f"no answer to request {number}: {line[:200]!r}")


def environment() -> dict[str, str]:
    """The variables of a process: sets have the same order in every process and every run."""
    own = {"SYMPY_GROUND_TYPES": "python", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return os.environ | own


class Channel:
    """A socket to a process that answers one request at a time: JSON lines, of which the second repeats a number.

    An answer may have `max_bytes`; then the process has ended.
    """

    def __init__(self, own: socket.socket, max_bytes: float = math.inf) -> None:
        self.socket, self.max_bytes = own, max_bytes
        self.number, self.deadline, self.unread = 0, math.inf, b""  # of the last request

    def send(self, request: dict[str, Any], seconds: float) -> bool:
        """Makes a request, to be answered within some seconds. Returns False if the process has ended."""
        self.number, self.unread, self.deadline = self.number + 1, b"", monotonic() + seconds
        with contextlib.suppress(OSError):
            self.socket.settimeout(seconds)
            self.socket.sendall(json.dumps(request | {"number": self.number}, default=str).encode() + b"\n")
            return True
        return False

    def receive(self) -> Outcome | None:
        """The answer; None while it is incomplete. Raises EOFError if the process has ended, or answers nonsense."""
        with contextlib.suppress(OSError):
            chunk = self.socket.recv(1 << 16)
            self.unread += chunk
            if len(self.unread) > self.max_bytes:
                return Outcome(Status.TOO_LONG, None, f"the answer has more than {self.max_bytes} bytes")
            if chunk and not chunk.endswith(b"\n"):
                return None
        return Outcome.of_reply(self.unread, self.number)


class Worker(Channel):
    """One process and its job: the index of a task, IDLE or LOADING."""

    def __init__(self, timeout: float, memory_limit_mb: int, cpu_seconds: float | None) -> None:
        own, other = socket.socketpair()
        super().__init__(own)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(memory_limit_mb), str(timeout), str(cpu_seconds or 0)],
                stdin=other.fileno(),
                stdout=other.fileno(),
                env=environment(),
                start_new_session=True,  # a group of its own: kill() reaches child processes, Ctrl-C does not
            )
        self.function = ""  # the one that it has, or is loading
        self.loaded = Outcome(Status.OK)  # of loading it
        self.job = IDLE

    def load(self, function: str) -> None:
        """Lets the worker import a function."""
        self.function, self.job = function, LOADING
        self.send({"load": function, "path": sys.path}, LOAD_SECONDS)

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        with self.socket, self.process:  # waits
            self.process.terminate()  # it kills the worker, and cleans up
