"""A worker process from outside, and the outcome of a task."""

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
LOOK_SECONDS = 0.1
"""Seconds between two looks of a waiting thread whether another thread has closed the pool."""
LOAD_SECONDS = 120.0
"""Seconds that a worker may take to import its function."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one task."""

    status: str
    """`ok`, `error` (it raised), `timeout`, `memory` (over the limit) or `crash` (it ended two workers)."""
    value: Any = None
    """The function's result, if the status is `ok`."""
    error: str = ""
    """Line, type and message of the exception, if the status is `error`."""


class Channel:
    """A connection to a process that answers one request at a time, in JSON lines. An answer repeats the number.

    Args:
        connection: The socket.
        max_bytes: Longest answer in bytes.
    """

    def __init__(self, connection: socket.socket, max_bytes: float = math.inf) -> None:
        self.socket = connection
        self.max_bytes = max_bytes
        self.number = 0
        """The number of the last request."""
        self.deadline = math.inf
        """The time, by `monotonic`, at which its answer is late."""
        self.unread = b""
        """The part of its answer that has come."""

    def send(self, request: dict[str, Any], seconds: float, sockets: Sequence[socket.socket] = ()) -> bool:
        """Makes a request, to be answered within some seconds. Returns False if the process has ended."""
        self.number += 1
        self.unread = b""
        self.deadline = monotonic() + seconds
        data = json.dumps(request | {"number": self.number}, default=str).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.socket.settimeout(seconds)
            if sockets:
                data = data[socket.send_fds(self.socket, [data], [passed.fileno() for passed in sockets]) :]
            self.socket.sendall(data)
            return True
        return False

    def receive(self) -> Outcome | None:
        """Returns the answer; None while it is incomplete; `crash` if the process has ended, or answers nonsense."""
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
    """Returns the outcomes of requests that are answered or late, after a wait of at most LOOK_SECONDS."""
    # Unlike `select.select`, it takes descriptors above 1023.
    poll = select.poll()
    for channel in channels:
        poll.register(channel.socket, select.POLLIN)
    patience = min((channel.deadline for channel in channels), default=0.0) - monotonic()
    readable = dict(poll.poll(math.ceil(1000 * max(0.0, min(patience, LOOK_SECONDS)))))
    answers = {channel: channel.receive() for channel in channels if channel.socket.fileno() in readable}
    timeouts = {channel: Outcome(Status.TIMEOUT) for channel in channels if monotonic() >= channel.deadline}
    return timeouts | {channel: outcome for channel, outcome in answers.items() if outcome}


class Process(Channel):
    """A script that reads requests from its stdin, and answers on its stdout."""

    def __init__(self, script: Path, *arguments: float) -> None:
        connection, remote = socket.socketpair()
        super().__init__(connection)
        variables = {"SYMPY_GROUND_TYPES": "python", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # Sets have the same order in every process and every run.
        variables["PYTHONHASHSEED"] = "0"
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                stdin=remote.fileno(),
                stdout=remote.fileno(),
                env=os.environ | variables,
                # In a new process group `kill` reaches its child processes, and Ctrl-C does not.
                start_new_session=True,
            )


class Worker(Process):
    """A process that runs a pool's tasks, and its job: the index of a task, IDLE or LOADING."""

    def __init__(self, timeout: float, memory_limit_mb: int, cpu_seconds: float | None) -> None:
        super().__init__(SCRIPT, memory_limit_mb, timeout, cpu_seconds or 0)
        self.function = ""
        """The function that it has, or is loading."""
        self.loaded = Outcome(Status.OK)
        """The outcome of loading the function."""
        self.job = IDLE

    def load(self, function: str) -> None:
        """Sends the request to import a function."""
        self.function, self.job = function, LOADING
        self.send({"load": function, "path": sys.path}, LOAD_SECONDS)

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        # Leaving the context waits for the process, which kills its worker and cleans up.
        with self.socket, self.process:
            self.process.terminate()
