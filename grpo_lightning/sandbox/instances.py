"""Objects that keep a state, each in a process of its own that can be killed."""

import array
import base64
import contextlib
import json
import math
import os
import pickle
import select
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from grpo_lightning.sandbox.pool import LOAD_SECONDS, LoadError, Outcome
from grpo_lightning.types import Status, UsageError

STARTED_AT_ONCE = 16
"""Instances started by one request. Each closes the sockets of those after it."""

SCRIPT = Path(__file__).parent / "inside" / "instance.py"


@dataclass(slots=True)
class Call:
    """A call of a method of one instance."""

    key: int
    """The instance: at most one call of each is under way."""
    method: str
    arguments: list[Any] = field(default_factory=list)
    """JSON values."""
    seconds: float | None = None
    """Seconds that it may take; None is as for all."""


class Instances:
    """Copies of an object, each in a process that can be killed: one that hangs costs nothing but itself.

    A first process imports what the object needs and copies itself by `fork`, which takes about a millisecond. A copy
    may use as much time and memory as it is allowed, answers at most `max_answer_bytes`, and takes every process and
    temporary file that it has made along when it ends. No file may be larger than the memory it may use.

    Args:
        prototype: The object. It is pickled, so its class must be in a module.
        num_workers: Calls under way at once. Instances without a call under way only wait.
        timeout: Seconds per call.
        memory_limit_mb: Memory per instance in MiB, in addition to what its imports need (Linux only).
        max_answer_bytes: Largest answer of a call, as JSON.

    Raises:
        UsageError: An argument is not positive.
    """

    def __init__(
        self,
        prototype: Any,
        num_workers: int = 4,
        timeout: float = 10.0,
        memory_limit_mb: int = 1024,
        max_answer_bytes: int = 1 << 16,
    ) -> None:
        limits = {"num_workers": num_workers, "timeout": timeout, "memory_limit_mb": memory_limit_mb}
        for key, value in (limits | {"max_answer_bytes": max_answer_bytes}).items():
            if not 0 < value < math.inf:
                raise UsageError(f"{key}={value}: give a number above 0")
        self.prototype = prototype
        self.num_workers = num_workers
        self.timeout = timeout
        self.memory_limit_mb = memory_limit_mb
        self.max_answer_bytes = max_answer_bytes
        self._origins: list[_Origin] = []
        """The first process, if it runs."""
        self._running: dict[int, _Instance] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        settings = (self.prototype, self.num_workers, self.timeout, self.memory_limit_mb, self.max_answer_bytes)
        return Instances, settings

    def load(self) -> None:
        """Starts the first process.

        Raises:
            LoadError: The object cannot be made there.
        """
        if self._origins and self._origins[0].pid != os.getpid():  # after a fork it belongs to the other process
            self._origins.clear()
            self._running.clear()
        if not self._origins:
            self._origins.append(_Origin(self.prototype, self.memory_limit_mb))
            weakref.finalize(self, _stop, self._origins, self._running, os.getpid())

    def start(self, seeds: dict[int, int]) -> None:
        """Starts an instance for each key, whose random numbers begin at its seed."""
        self.load()
        assert not seeds.keys() & self._running.keys(), "end an instance before it begins anew"
        for first in range(0, len(seeds), STARTED_AT_ONCE):
            keys = [*seeds][first : first + STARTED_AT_ONCE]
            with contextlib.suppress(OSError, EOFError):  # their calls will find out
                started = self._origins[0].start([seeds[key] for key in keys])
                self._running |= dict(zip(keys, started, strict=True))

    def call(self, calls: Sequence[Call]) -> list[Outcome]:
        """The outcome of each call, in order: `ok`, `error`, `timeout`, `memory`, `crash` or `too_long`.

        An instance ends with a call whose outcome is neither `ok` nor `error`. Calls of one that has ended give
        `crash`.
        """
        done: dict[int, Outcome] = {}
        waiting, busy = deque(range(len(calls))), dict[int, int]()
        while len(done) < len(calls):
            while waiting and len(busy) < self.num_workers:
                index = waiting.popleft()
                instance = self._running.get(calls[index].key)
                if instance is None or not instance.send(calls[index], self.timeout):
                    done[index] = self._lose(calls[index].key, Status.CRASH)
                else:
                    busy[instance.channel.fileno()] = index
            for descriptor in self._settled(busy, calls):
                index = busy.pop(descriptor)
                done[index] = self._outcome(calls[index].key)
        return [done[index] for index in range(len(calls))]

    def end(self, keys: Sequence[int]) -> None:
        """Ends instances. One that has ended already is left out."""
        ending = [self._running.pop(key) for key in keys if key in self._running]
        for instance in ending:
            instance.channel.close()
        if ending and self._origins:
            try:
                self._origins[0].ask({"end": [instance.pid for instance in ending]})
            except (OSError, EOFError):
                self.close()

    def close(self) -> None:
        """Ends everything; the next start begins anew. May be called twice."""
        _stop(self._origins, self._running, os.getpid())

    def _settled(self, busy: dict[int, int], calls: Sequence[Call]) -> list[int]:
        """The descriptors of calls that are answered or late, after waiting for one."""
        instances = {descriptor: self._running[calls[index].key] for descriptor, index in busy.items()}
        poll = select.poll()
        for descriptor in instances:
            poll.register(descriptor, select.POLLIN)
        patience = min((instance.deadline for instance in instances.values()), default=0.0) - monotonic()
        for descriptor, _ in poll.poll(math.ceil(1000 * max(0.0, patience))):
            instances[descriptor].receive(self.max_answer_bytes)
        now = monotonic()
        return [at for at, instance in instances.items() if instance.has_answered or now >= instance.deadline]

    def _outcome(self, key: int) -> Outcome:
        """The outcome of a call that is answered or late."""
        instance = self._running[key]
        if not instance.has_answered:
            return self._lose(key, Status.TIMEOUT)
        if len(instance.unread) > self.max_answer_bytes:
            error = f"the answer has more than {self.max_answer_bytes} bytes"
            return self._lose(key, Status.TOO_LONG, error)
        line, instance.unread = instance.unread, b""
        try:
            outcome = Outcome.of_reply(line, instance.number)
        except ValueError:  # the process has ended, or something else wrote there
            return self._lose(key, Status.CRASH)
        if outcome.status == Status.MEMORY:
            self.end([key])
        return outcome

    def _lose(self, key: int, status: str, error: str = "") -> Outcome:
        self.end([key])
        return Outcome(status, None, error)


class _Instance:
    """One process and the socket that it answers on."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self.number = 0
        """That of its last call, which the answer repeats."""
        self.deadline = math.inf
        self.unread = b""
        self.has_answered = False

    def send(self, call: Call, timeout: float) -> bool:
        """Gives the instance a call. Returns False if it has ended."""
        seconds = timeout if call.seconds is None else call.seconds
        self.deadline, self.has_answered, self.unread = monotonic() + seconds, False, b""
        self.number += 1
        request = {"call": call.method, "arguments": call.arguments, "number": self.number}
        try:
            self.channel.settimeout(seconds)
            self.channel.sendall(json.dumps(request, default=str).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, max_bytes: int) -> None:
        """Reads what there is of an answer; the end of the process and too many bytes count as one."""
        try:
            chunk = self.channel.recv(1 << 16)
        except OSError:
            chunk = b""
        self.unread += chunk
        self.has_answered = not chunk or chunk.endswith(b"\n") or len(self.unread) > max_bytes


class _Origin:
    """The process that copies itself."""

    def __init__(self, prototype: Any, memory_limit_mb: int) -> None:
        self.pid = os.getpid()
        self.control, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(other.fileno()), str(memory_limit_mb)],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        self.control.settimeout(LOAD_SECONDS)
        try:
            blob = base64.b64encode(pickle.dumps(prototype)).decode()
            self.ask({"load": blob, "path": sys.path})
        except (OSError, EOFError, pickle.PicklingError, AttributeError) as error:
            self.close()
            raise LoadError(f"{type(error).__name__}: {error}") from error
        except LoadError:
            self.close()
            raise

    def ask(self, request: dict[str, Any], *sockets: socket.socket) -> Any:
        """The answer to a request, which may bring sockets along."""
        data = json.dumps(request).encode() + b"\n"
        if sockets:
            passed = array.array("i", [one.fileno() for one in sockets])
            sent = self.control.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            data = data[sent:]
        self.control.sendall(data)
        line = b""
        while not line.endswith(b"\n"):
            chunk = self.control.recv(1 << 16)
            if not chunk:
                raise EOFError("the process ended")
            line += chunk
        reply = json.loads(line)
        if reply["status"] != Status.OK:
            raise LoadError(reply["error"])
        return reply["value"]

    def start(self, seeds: Sequence[int]) -> list[_Instance]:
        """New instances."""
        pairs = [socket.socketpair() for _ in seeds]
        try:
            pids = self.ask({"start": [*seeds]}, *(other for _, other in pairs))
        except BaseException:
            for own, _ in pairs:
                own.close()
            raise
        finally:
            for _, other in pairs:
                other.close()
        return [_Instance(pid, own) for pid, (own, _) in zip(pids, pairs, strict=True)]

    def close(self) -> None:
        """Ends the process, and every instance with it."""
        self.control.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _stop(origins: list[_Origin], running: dict[int, _Instance], pid: int) -> None:
    """Ends every process, unless this process is a fork of the one that started them."""
    if pid != os.getpid():
        return
    for instance in running.values():
        instance.channel.close()
    running.clear()
    for origin in origins:
        origin.close()
    origins.clear()
