"""Worker processes that can be killed. They run the code that parses model output, and the user's own functions."""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from grpo_lightning.types import Status, UsageError

SCRIPT = Path(__file__).with_name("main.py")
LOAD_SECONDS = 120.0
"""Seconds that a worker may take to import its function."""
LOOK_SECONDS = 0.1
"""Seconds after which a `map` looks whether another thread has closed the pool."""
IDLE, LOADING = -1, -2


@dataclass(slots=True)
class Outcome:
    """The outcome of one task."""

    status: str
    """`ok`, `error` (it raised), `timeout`, `memory` (over the limit) or `crash` (it ended two workers)."""
    value: Any = None
    """The value that the function returned, if the status is `ok`."""
    error: str = ""
    """Line, type and message of the exception, if the status is `error`."""

    @classmethod
    def of_reply(cls, line: bytes, number: int) -> "Outcome":
        """The outcome that a process tells in a line.

        Raises:
            ValueError: It is no answer to the request of this number.
        """
        try:
            reply = json.loads(line)
            if reply["number"] == number:
                return cls(reply["status"], reply.get("value"), reply.get("error", ""))
        except (KeyError, TypeError, AttributeError):
            pass
        raise ValueError(f"no answer to request {number}: {line[:200]!r}")


class Closed(BaseException):
    """The pool was closed while another thread waited for it. As an interrupt, it is no failure of a task."""


class LoadError(RuntimeError):
    """A worker could not import the function; the message holds the worker's error."""


def inside(function: str) -> str:
    """The name by which a pool finds a function of `sandbox/inside/`, for example `separators.ends`."""
    module, name = function.split(".")
    return f"{Path(__file__).parent / 'inside' / module}.py:{name}"


class WorkerPool:
    """Runs a function in separate processes with limits on time and memory.

    Use it for code that may hang, crash or need too much memory. The processes start at the first task, with exec and
    not fork: CUDA and threads here do not affect them, and the user's `__main__` is not imported again. A task whose
    worker is lost is tried once more in a new worker. What a worker has started, and its temporary files, end with it.

    Args:
        num_workers: Number of processes.
        timeout: Seconds per task; importing the function does not count.
        memory_limit_mb: Memory per worker in MiB, in addition to what its imports need (Linux only). No file that it
            writes may be larger.
        cpu_seconds: CPU seconds per task; None sets no limit. Unlike the time for `timeout`, they pass no faster while
            the machine is busy with other work.

    Raises:
        UsageError: An argument is not positive.
    """

    def __init__(
        self, num_workers: int = 2, timeout: float = 2.0, memory_limit_mb: int = 1024, cpu_seconds: float | None = None
    ) -> None:
        limits = {"num_workers": num_workers, "timeout": timeout, "memory_limit_mb": memory_limit_mb}
        for key, value in limits.items():
            if not 0 < value < math.inf:
                raise UsageError(f"{key}={value}: give a number above 0")
        self.num_workers = num_workers
        self.timeout = timeout
        self.memory_limit_mb = memory_limit_mb
        self.cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._closing = False
        self._running: list[_Worker] = []
        self._pid = os.getpid()
        weakref.finalize(self, _stop, self._running, self._pid)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerPool, (self.num_workers, self.timeout, self.memory_limit_mb, self.cpu_seconds)

    def load(self, function: str) -> list[str]:
        """Imports `function` in a worker. Returns the names of the arguments that it must be given.

        Raises:
            LoadError: The import failed.
        """
        return self._run(function, [])[0].value

    def map(self, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> list[Outcome]:
        """The outcome of `function` for each task, in order; tasks run in parallel.

        Args:
            function: `package.module.function`, `package.module:function` or `path/to/file.py:function`.
            tasks: JSON values. A list holds the arguments. A dict becomes one argument with these attributes, and
                `{"samples": [...]}` becomes a list of such objects.

        Raises:
            LoadError: The function could not be imported.
            Closed: Another thread has closed the pool.
        """
        return self._run(function, tasks) if tasks else []

    def close(self) -> None:
        """Ends the processes, and a `map` in another thread; the next task starts new ones."""
        self._closing = True
        with self._lock:
            self._closing = False
            _stop(self._running, self._pid)

    def _run(self, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> list[Outcome]:
        with self._lock:
            if self._pid != os.getpid():  # after a fork the workers belong to the other process
                self._pid = os.getpid()
                self._running.clear()
                weakref.finalize(self, _stop, self._running, self._pid)
            try:
                return _Run(self, function, tasks).outcomes()
            except BaseException:
                _stop(self._running, self._pid)
                raise


class _Worker:
    """One process and its job: the index of a task, IDLE or LOADING."""

    def __init__(self, timeout: float, memory_limit_mb: int, cpu_seconds: float | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(memory_limit_mb), str(timeout), str(cpu_seconds or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "SYMPY_GROUND_TYPES": "python",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": "0",  # sets have the same order in every worker and every run
            },
            start_new_session=True,  # a group of its own: kill() reaches child processes, Ctrl-C does not
        )
        self.function = ""  # the one that it has, or is loading
        self.loaded = Outcome(Status.OK)  # of loading it
        self.job = IDLE
        self.number = 0  # that of the last request
        self.deadline = math.inf
        self.unread = b""

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

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
        self.process.terminate()  # it kills the worker, and cleans up
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class _Run:
    """One call of `map`: the tasks that wait, those under way, and the outcomes of the others."""

    def __init__(self, pool: WorkerPool, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> None:
        self.pool, self.function, self.tasks = pool, function, tasks
        self.waiting = deque(range(len(tasks)))
        self.retried: set[int] = set()
        self.done: dict[int, Outcome] = {}
        self.loads_lost = 0

    def outcomes(self) -> list[Outcome]:
        """Waits until every task has an outcome, and returns them; without tasks, that of loading the function."""
        while not self._is_finished():
            if self.pool._closing:
                raise Closed
            self._give_out_work()
            busy = [worker for worker in self.pool._running if worker.job != IDLE]
            patience = max(0.0, min(worker.deadline for worker in busy) - monotonic())
            patience = min(patience, LOOK_SECONDS)
            readable = ready(busy, patience)
            for worker in busy:
                self._look_at(worker, worker.fileno() in readable)
        loaded = [worker.loaded for worker in self.pool._running if self._is_ready(worker)]
        return [self.done[index] for index in range(len(self.tasks))] or loaded

    def _is_finished(self) -> bool:
        if not self.tasks:
            return any(map(self._is_ready, self.pool._running))
        return len(self.done) == len(self.tasks)

    def _is_ready(self, worker: _Worker) -> bool:
        return worker.job != LOADING and worker.function == self.function

    def _give_out_work(self) -> None:
        running = self.pool._running
        while len(running) < min(self.pool.num_workers, max(1, len(self.tasks) - len(self.done))):
            self._start()
        for worker in running:
            if worker.job != IDLE:
                continue
            if worker.function != self.function:
                self._load(worker)
            elif self.waiting:
                index = self.waiting.popleft()
                worker.send(index, {"task": self.tasks[index]}, self.pool.timeout)

    def _start(self) -> None:
        worker = _Worker(self.pool.timeout, self.pool.memory_limit_mb, self.pool.cpu_seconds)
        self.pool._running.append(worker)
        self._load(worker)

    def _load(self, worker: _Worker) -> None:
        worker.function = self.function
        worker.send(LOADING, {"load": self.function, "path": sys.path}, LOAD_SECONDS)

    def _look_at(self, worker: _Worker, readable: bool) -> None:
        try:
            reply = worker.receive() if readable else None
        except EOFError:
            late = monotonic() >= worker.deadline or worker.process.wait() == 128 + signal.SIGPROF
            self._lose(worker, Status.TIMEOUT if late else Status.CRASH)
            return
        if reply is None:
            if monotonic() >= worker.deadline:
                self._lose(worker, Status.TIMEOUT)
        elif worker.job == LOADING:
            worker.job, worker.loaded = IDLE, reply
            if reply.status != Status.OK:
                failed, worker.function = worker.function, ""
                if failed == self.function:  # else it is from the previous map, which ended without this worker
                    raise LoadError(f"cannot load {failed}: {reply.error}")
        elif reply.status == Status.MEMORY:  # the task may have left much behind: start a new worker
            self._lose(worker, Status.MEMORY)
        else:
            self.done[worker.job] = reply
            worker.job = IDLE

    def _lose(self, worker: _Worker, status: str) -> None:
        """Kills the worker, and tries its task again unless its time was up."""
        worker.kill()
        self.pool._running.remove(worker)
        if worker.job == LOADING:
            self.loads_lost += 1
            if status == Status.TIMEOUT or self.loads_lost > self.pool.num_workers:
                raise LoadError(
                    f"cannot load {self.function}: the worker {'hung' if status == Status.TIMEOUT else 'died'}"
                )
            return
        self._start()  # now, so that it is ready for the next call
        if status == Status.TIMEOUT or worker.job in self.retried:
            self.done[worker.job] = Outcome(status)
        else:
            self.retried.add(worker.job)
            self.waiting.appendleft(worker.job)


def ready(workers: Sequence[_Worker], seconds: float) -> set[int]:
    """The descriptors of the workers that have answered or ended, after waiting at most `seconds`."""
    waiting = select.poll()  # unlike select.select, for descriptors above 1023 too
    for worker in workers:
        waiting.register(worker.fileno(), select.POLLIN)
    return {descriptor for descriptor, _ in waiting.poll(math.ceil(1000 * seconds))}


def _stop(running: list[_Worker], pid: int) -> None:
    """Kills every worker, unless this process is a fork of the one that started them."""
    if pid == os.getpid():
        for worker in running:
            worker.kill()
        running.clear()
