"""Objects that keep a state, each in a process of its own that can be killed."""

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

STARTED_AT_ONCE = 16  # instances started by one request: each closes the sockets of those after it
SCRIPT = Path(__file__).parent / "inside" / "instance.py"


@dataclass(slots=True)
class Call:
    """A call of a method of one instance."""

    key: int  # the instance
    method: str
    arguments: list[Any] = field(default_factory=list)
    seconds: float | None = None  # of CPU time that it may take; None is as for all


@dataclass
class Limits:
    """Limits of a conversation with an environment.

    A conversation that reaches one of the first two ends there, and its completion is truncated. The limit of a turn is
    `sampling.max_new_tokens`.

    Args:
        max_turns: Most turns of the policy.
        max_tokens: Most tokens after the prompt, drawn and given; None sets no limit but the model's context.
        seconds: CPU seconds that the environment may take per call of a tool, or per turn without calls. A call that
            waits, for a server or in a sleep, is ended after ten times as long. So other work on the machine ends none.
        memory_limit_mb: Memory per conversation in MiB, in addition to what imports need (Linux only).
        max_answer_bytes: Most bytes that the environment may answer to a turn.
        num_workers: Environments that compute at once. Give more for those that wait for a server.
    """

    max_turns: int = 8
    max_tokens: int | None = None
    seconds: float = 10.0
    memory_limit_mb: int = 1024
    max_answer_bytes: int = 65536
    num_workers: int = 2

    def __post_init__(self) -> None:
        for limit in fields(self):
            at_least(f"data.limits.{limit.name}", getattr(self, limit.name), 0.001 if limit.name == "seconds" else 1)


@dataclass(eq=False)
class Instances:
    """Copies of an object, each in a process that can be killed: one that hangs costs nothing but itself.

    A first process imports what the object needs and copies itself by `fork`, which takes about a millisecond. A copy
    keeps to its limits, and takes every process and temporary file that it has made along when it ends. No file may be
    larger than the memory it may use. The prototype is pickled, so its class must be in a module.
    """

    prototype: Any
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._origin: _Origin | None = None
        self._running: dict[int, _Instance] = {}

    def load(self) -> "_Origin":
        """Starts the first process, unless it runs."""
        if self._origin is None or self._origin.pid != os.getpid():  # after a fork it belongs to the other process
            self._running.clear()
            self._origin = _Origin(self.prototype, self.limits.memory_limit_mb)
            weakref.finalize(self, _finish, self._running, self._origin)  # for who forgets `close`
        return self._origin

    def start(self, seeds: dict[int, int]) -> None:
        """Starts an instance for each key, whose random numbers begin at its seed."""
        origin = self.load()
        assert not seeds.keys() & self._running.keys(), "end an instance before it begins anew"
        for first in range(0, len(seeds), STARTED_AT_ONCE):
            keys = [*seeds][first : first + STARTED_AT_ONCE]
            with contextlib.suppress(OSError, EOFError):  # their calls will find out
                started = origin.start([seeds[key] for key in keys], self.limits.max_answer_bytes)
                self._running |= zip(keys, started, strict=True)

    def call(self, calls: Sequence[Call]) -> list[Outcome]:
        """The outcome of each call, in order: `ok`, `error`, `timeout`, `memory`, `crash` or `too_long`.

        Calls are of different instances. An instance ends with a call whose outcome is neither `ok` nor `error`. A call
        of one that has ended gives `crash`.
        """
        done: dict[int, Outcome] = {}
        waiting, busy = deque(calls), dict[Channel, int]()
        while waiting or busy:
            while waiting and len(busy) < self.limits.num_workers:
                call = waiting.popleft()
                seconds = self.limits.seconds if call.seconds is None else call.seconds
                request = {"call": call.method, "arguments": call.arguments, "cpu_seconds": seconds}
                instance = self._running.get(call.key)
                if instance and instance.send(request, WAITING * seconds):
                    busy[instance] = call.key
                else:
                    self.end([call.key])
                    done[call.key] = Outcome(Status.CRASH)
            for channel, outcome in settled([*busy]).items():
                key = busy.pop(channel)
                done[key] = outcome
                if outcome.status not in (Status.OK, Status.ERROR):
                    exit_codes = self.end([key])
                    if outcome.status == Status.CRASH and exit_codes == [-signal.SIGPROF]:
                        done[key] = Outcome(Status.TIMEOUT)
        return [done[call.key] for call in calls]

    def end(self, keys: Sequence[int]) -> list[int]:
        """Ends instances, and returns their exit codes, where they are known. One that has ended is left out."""
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
    """One process and the socket that it answers on."""

    def __init__(self, pid: int, own: socket.socket, max_bytes: int) -> None:
        super().__init__(own, max_bytes)
        self.pid = pid


def _finish(running: "dict[int, _Instance]", origin: "_Origin | None") -> None:
    """Ends instances, and their first process unless this process is a fork of its parent."""
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
        """The answer to a request, which may bring sockets along."""
        self.send(request, LOAD_SECONDS, sockets)
        while not (outcome := self.receive()):
            pass
        if outcome.status == Status.CRASH:
            raise EOFError("the process ended")
        if outcome.status != Status.OK:
            raise LoadError(outcome.error)
        return outcome.value

    def start(self, seeds: Sequence[int], max_bytes: int) -> list[_Instance]:
        """New instances."""
        pairs = [socket.socketpair() for _ in seeds]
        try:
            pids = self.ask({"start": [*seeds]}, [other for _, other in pairs])
        except BaseException:
            for own, _ in pairs:
                own.close()
            raise
        finally:
            for _, other in pairs:
                other.close()
        return [_Instance(pid, own, max_bytes) for pid, (own, _) in zip(pids, pairs, strict=True)]

    def close(self) -> None:
        """Ends the process, and every instance with it."""
        self.socket.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
