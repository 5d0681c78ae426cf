"""Objects that keep a state, each in a separate process that can be killed."""

import base64
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from grpo_lightning.sandbox.pool import WAITING, LoadError
from grpo_lightning.sandbox.worker import LOAD_SECONDS, Channel, Outcome, Process, settled
from grpo_lightning.types import Status, at_least

STARTED_AT_ONCE = 16
"""Instances started by one request; each closes the sockets of all later ones in the request."""
SCRIPT = Path(__file__).parent / "inside" / "instance.py"


@dataclass(slots=True)
class InstanceCall:
    """A call of a method of one instance."""

    key: int
    """Key of the instance."""
    method: str
    """Name of the method."""
    arguments: list[Any] = field(default_factory=list)
    """Arguments that JSON can write."""
    seconds: float | None = None
    """Limit of the call, in seconds of CPU time; None takes `Limits.seconds`."""


@dataclass
class Limits:
    """Limits of a conversation with an environment.

    A conversation that reaches one of the first two ends there, and its completion is truncated. The limit of a turn is
    `sampling.max_new_tokens`.

    Args:
        max_turns: Most turns of the policy.
        max_tokens: Most tokens after the prompt, sampled and context; None sets no limit but the model's context.
        seconds: CPU seconds that the environment may take per call of a tool, or per turn without calls. A call that
            waits, for a server or in a sleep, is ended after ten times as long, so other work on the machine ends no
            call.
        memory_limit_mb: Memory per conversation in MiB, in addition to the memory that imports need (Linux only).
        max_answer_bytes: Most bytes that the environment may answer to a turn.
        num_workers: Environments that compute at once. Give more for environments that wait for a server.
    """

    max_turns: int = 8
    """Most turns of the policy."""
    max_tokens: int | None = None
    """Most tokens after the prompt; None sets no limit."""
    seconds: float = 10.0
    """CPU seconds per call."""
    memory_limit_mb: int = 1024
    """MiB per conversation."""
    max_answer_bytes: int = 65536
    """Most bytes of an answer."""
    num_workers: int = 2
    """Environments that compute at once."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            at_least(f"data.limits.{limit.name}", getattr(self, limit.name), 0.001 if limit.name == "seconds" else 1)


@dataclass(eq=False)
class Instances:
    """Copies of an object, each in a process that can be killed: a copy that hangs harms no other.

    A first process imports the object's modules and copies itself by `fork`, which takes about a millisecond. A copy
    keeps to its limits. Every process and temporary file that it has made ends with it. No file may be larger than the
    memory that the copy may use.
    """

    prototype: Any
    """The object that is copied. It is pickled, so its class must be in a module."""
    limits: Limits = field(default_factory=Limits)
    """Limits of each copy."""

    def __post_init__(self) -> None:
        self._origin: _Origin | None = None
        self._running: dict[int, _Instance] = {}

    def load(self) -> "_Origin":
        """Starts the first process, unless it runs."""
        # After a fork the origin belongs to the parent process.
        if self._origin is None or self._origin.pid != os.getpid():
            self._running.clear()
            self._origin = _Origin(self.prototype, self.limits.memory_limit_mb)
            weakref.finalize(self, _finish, self._running, self._origin)  # in case `close` is never called
        return self._origin

    def start(self, seeds: dict[int, int]) -> None:
        """Starts an instance for each key, whose random numbers begin at its seed."""
        origin = self.load()
        assert not seeds.keys() & self._running.keys(), "end an instance before it begins anew"
        for start in range(0, len(seeds), STARTED_AT_ONCE):
            keys = [*seeds][start : start + STARTED_AT_ONCE]
            # An instance that does not start is missing; its calls give `crash`.
            with contextlib.suppress(OSError, EOFError):
                instances = origin.start([seeds[key] for key in keys], self.limits.max_answer_bytes)
                self._running |= zip(keys, instances, strict=True)

    def call(self, calls: Sequence[InstanceCall]) -> list[Outcome]:
        """Returns the outcome of each call, in order: `ok`, `error`, `timeout`, `memory`, `crash` or `too_long`.

        Calls are of different instances. An instance ends with a call whose outcome is neither `ok` nor `error`. A call
        of an instance that has ended gives `crash`.
        """
        outcomes: dict[int, Outcome] = {}
        waiting = deque(calls)
        busy: dict[Channel, int] = {}  # the keys of the instances that compute, by their channels
        while waiting or busy:
            # Send calls to as many instances as may compute at once.
            while waiting and len(busy) < self.limits.num_workers:
                call = waiting.popleft()
                seconds = self.limits.seconds if call.seconds is None else call.seconds
                request = {"call": call.method, "arguments": call.arguments, "cpu_seconds": seconds}
                instance = self._running.get(call.key)
                if instance and instance.send(request, WAITING * seconds):
                    busy[instance] = call.key
                else:
                    self.end([call.key])
                    outcomes[call.key] = Outcome(Status.CRASH)

            # Collect what they answer. The kernel's signal at the limit of CPU time looks like a crash.
            for channel, outcome in settled([*busy]).items():
                key = busy.pop(channel)
                outcomes[key] = outcome
                if outcome.status not in (Status.OK, Status.ERROR):
                    exit_codes = self.end([key])
                    if outcome.status == Status.CRASH and exit_codes == [-signal.SIGPROF]:
                        outcomes[key] = Outcome(Status.TIMEOUT)
        return [outcomes[call.key] for call in calls]

    def end(self, keys: Sequence[int]) -> list[int]:
        """Ends instances, and returns their exit codes, if known. Instances that have ended before are left out."""
        ending = [self._running.pop(key) for key in keys if key in self._running]
        for instance in ending:
            instance.socket.close()
        if ending and self._origin:
            try:
                return list(self._origin.ask({"end": [instance.pid for instance in ending]}))
            except (OSError, EOFError):
                self.close()
        return []

    def close(self) -> None:
        """Ends everything; the next start begins anew. May be called twice."""
        _finish(self._running, self._origin)
        self._origin = None


class _Instance(Channel):
    """A copy's process, and the socket that it answers on."""

    def __init__(self, pid: int, local: socket.socket, max_bytes: int) -> None:
        super().__init__(local, max_bytes)
        self.pid = pid


def _finish(running: "dict[int, _Instance]", origin: "_Origin | None") -> None:
    """Ends instances and their first process, unless it belongs to the parent of this process."""
    for instance in running.values():
        instance.socket.close()
    running.clear()
    if origin is not None and origin.pid == os.getpid():
        origin.close()


class _Origin(Process):
    """The process that copies itself."""

    def __init__(self, prototype: Any, memory_limit_mb: int) -> None:
        self.pid = os.getpid()
        super().__init__(SCRIPT, memory_limit_mb)
        try:
            self.ask({"load": base64.b64encode(pickle.dumps(prototype)).decode(), "path": sys.path})
        except Exception as error:
            self.close()
            raise error if isinstance(error, LoadError) else LoadError(f"{type(error).__name__}: {error}") from error

    def ask(self, request: dict[str, Any], sockets: Sequence[socket.socket] = ()) -> Any:
        """Sends a request, perhaps with sockets, and returns the answer."""
        self.send(request, LOAD_SECONDS, sockets)
        while not (outcome := self.receive()):
            pass
        if outcome.status == Status.CRASH:
            raise EOFError("the process ended")
        if outcome.status != Status.OK:
            raise LoadError(outcome.error)
        return outcome.value

    def start(self, seeds: Sequence[int], max_bytes: int) -> list[_Instance]:
        """Starts an instance for each seed."""
        pairs = [socket.socketpair() for _ in seeds]
        try:
            pids = self.ask({"start": [*seeds]}, [remote for _, remote in pairs])
        except BaseException:
            for local, _ in pairs:
                local.close()
            raise
        finally:
            for _, remote in pairs:
                remote.close()
        return [_Instance(pid, local, max_bytes) for pid, (local, _) in zip(pids, pairs, strict=True)]

    def close(self) -> None:
        """Ends the process, and every instance with it."""
        self.socket.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
