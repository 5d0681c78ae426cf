"""A worker process as its pool sees it, and the outcome of a task."""

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from grpo_lightning.types import Status

SCRIPT = Path(__file__).with_name("main.py")
IDLE, LOADING = -1, -2
LOOK_SECONDS = 0.1  # after which whoever waits looks whether another thread has closed the pool
LOAD_SECONDS = 120.0  # that a worker may take to import its function


@dataclass(slots=True)
class Outcome:
    """The outcome of one task."""

    status: str  # `ok`, `error` (it raised), `timeout`, `memory` (over the limit) or `crash` (it ended two workers)
    value: Any = None  # what the function returned, if the status is `ok`
    error: str = ""  # line, type and message of the exception, if the status is `error`


class Channel:
    """A socket to a process that answers one request at a time: JSON lines, of which the second repeats a number.

    An answer may have `max_bytes`.
    """

    def __init__(self, own: socket.socket, max_bytes: float = math.inf) -> None:
        self.socket, self.max_bytes = own, max_bytes
        self.number, self.deadline, self.unread = 0, math.inf, b""  # of the last request

    def send(self, request: dict[str, Any], seconds: float, sockets: Sequence[socket.socket] = ()) -> bool:
        """Makes a request, to be answered within some seconds. Returns False if the process has ended."""
        self.number, self.unread, self.deadline = self.number + 1, b"", monotonic() + seconds
        data = json.dumps(request | {"number": self.number}, default=str).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.socket.settimeout(seconds)
            if sockets:
                data = data[socket.send_fds(self.socket, [data], [one.fileno() for one in sockets]) :]
            self.socket.sendall(data)
            return True
        return False

    def receive(self) -> Outcome | None:
        """The answer; None while it is incomplete. It is `crash` if the process has ended, or answers nonsense."""
        with contextlib.suppress(OSError):
            chunk = self.socket.recv(1 << 16)
            self.unread += chunk
            if len(self.unread) > self.max_bytes:
                return Outcome(Status.TOO_LONG, None, f"the answer has more than {self.max_bytes} bytes")
            if chunk and not chunk.endswith(b"\n"):
                return None
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            reply = json.loads(self.unread)
            if reply["number"] == self.number:
                return Outcome(reply["status"], reply.get("value"), reply.get("error", ""))
        return Outcome(Status.CRASH)


AnyChannel = TypeVar("AnyChannel", bound=Channel)


def settled(channels: Sequence[AnyChannel]) -> dict[AnyChannel, Outcome]:
    """The outcomes of the requests that are answered or late, after waiting for one for at most LOOK_SECONDS."""
    poll = select.poll()  # unlike select.select, for descriptors above 1023 too
    for channel in channels:
        poll.register(channel.socket, select.POLLIN)
    patience = min((channel.deadline for channel in channels), default=0.0) - monotonic()
    readable = dict(poll.poll(math.ceil(1000 * max(0.0, min(patience, LOOK_SECONDS)))))
    found = {one: one.receive() for one in channels if one.socket.fileno() in readable}
    late = {one: Outcome(Status.TIMEOUT) for one in channels if monotonic() >= one.deadline}
    return late | {one: outcome for one, outcome in found.items() if outcome}


class Process(Channel):
    """A script that reads requests from its stdin, and answers on its stdout."""

    def __init__(self, script: Path, *arguments: float) -> None:
        own, other = socket.socketpair()
        super().__init__(own)
        # Sets have the same order in every process and every run.
        variables = {"SYMPY_GROUND_TYPES": "python", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with other:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                stdin=other.fileno(),
                stdout=other.fileno(),
                env=os.environ | variables | {"PYTHONHASHSEED": "0"},
                start_new_session=True,  # a group of its own: kill() reaches child processes, Ctrl-C does not
            )


class Worker(Process):
    """One process and its job: the index of a task, IDLE or LOADING."""

    def __init__(self, timeout: float, memory_limit_mb: int, cpu_seconds: float | None) -> None:
        super().__init__(SCRIPT, memory_limit_mb, timeout, cpu_seconds or 0)
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
