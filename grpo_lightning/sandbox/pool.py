"""Worker processes that can be killed: there runs what reads a model's text or is a user's code."""

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

from grpo_lightning.types import UsageError

OK, ERROR, TIMEOUT, MEMORY, CRASH = "ok", "error", "timeout", "memory", "crash"

SCRIPT = Path(__file__).with_name("main.py")
LOAD_SECONDS = 120.0
"""How long a worker may take to import its function."""
IDLE, LOADING = -1, -2


@dataclass(slots=True)
class Outcome:
    """What became of one task."""

    status: str
    """`ok`, `error` (it raised), `timeout`, `memory` (over the limit) or `crash` (two workers died of it)."""
    value: Any = None
    """What the function returned, if `ok`."""
    error: str = ""
    """The exception's type and text, if `error`."""


class LoadError(RuntimeError):
    """A worker could not import the function; the message has the worker's own error."""


def inside(function: str) -> str:
    """The name under which a pool finds a function of `sandbox/inside/`: `separators.ends` for `ends` there."""
    module, name = function.split(".")
    return f"{Path(__file__).parent / 'inside' / module}.py:{name}"


class WorkerPool:
    """Runs a function in separate processes with a limit on time and memory. Starts them at the first task.

    The processes are started with exec, not fork, so CUDA and threads here do not matter to them, and the
    user's `__main__` is not imported again. A lost worker costs nothing: its task is tried once more in a
    fresh one.

    Args:
        workers: Number of processes.
        timeout: Seconds one task may take; importing the function does not count.
        memory_limit_mb: Memory one worker may use on top of what its imports took, in MiB (Linux only).
        cpu_seconds: Processor time one task may take, if that is limited too: unlike `timeout` it does not run
            faster while the machine is busy with something else.

    Raises:
        UsageError: An argument is not positive.
    """

    def __init__(
        self, workers: int = 2, timeout: float = 2.0, memory_limit_mb: int = 1024, cpu_seconds: float | None = None
    ) -> None:
        for key, number in (("workers", workers), ("timeout", timeout), ("memory_limit_mb", memory_limit_mb)):
            if not 0 < number < math.inf:
                raise UsageError(f"{key}={number}: give a number above 0")
        self.workers, self.timeout, self.memory_limit_mb, self.cpu_seconds = (
            workers,
            timeout,
            memory_limit_mb,
            cpu_seconds,
        )
        self._lock = threading.Lock()
        self._running: list[_Worker] = []
        self._pid = os.getpid()
        weakref.finalize(self, _stop, self._running, self._pid)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerPool, (self.workers, self.timeout, self.memory_limit_mb, self.cpu_seconds)

    def load(self, function: str) -> None:
        """Imports `function` in a worker.

        Raises:
            LoadError: That failed.
        """
        self._run(function, [])

    def map(self, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> list[Outcome]:
        """Calls `function` for each task, in parallel; outcomes come in the order of the tasks.

        Args:
            function: `package.module.function`, `package.module:function` or `path/to/file.py:function`.
            tasks: JSON: a list holds the arguments, a dict becomes one argument with these attributes.

        Raises:
            LoadError: The function could not be imported.
        """
        return self._run(function, tasks) if tasks else []

    def close(self) -> None:
        """Ends the processes; a later task starts new ones."""
        with self._lock:
            _stop(self._running, self._pid)

    def _run(self, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> list[Outcome]:
        with self._lock:
            if self._pid != os.getpid():  # forked: the workers belong to the other process
                self._pid = os.getpid()
                self._running.clear()
                weakref.finalize(self, _stop, self._running, self._pid)
            try:
                return _Run(self, function, tasks).outcomes()
            except BaseException:
                _stop(self._running, self._pid)
                raise


class _Worker:
    """One process and the job it is on: a task's index, IDLE or LOADING."""

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
                "PYTHONHASHSEED": "0",  # what goes through a set comes out the same in every worker and every run
            },
            start_new_session=True,  # a group: kill() takes the task's child processes along; Ctrl-C is ours
        )
        self.function = ""  # which it has, or is loading
        self.job = IDLE
        self.deadline = math.inf
        self.unread = b""

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, job: int, request: dict[str, Any], seconds: float) -> None:
        """Puts the worker on `job`. A worker that is already dead shows when its answer is read."""
        assert self.process.stdin is not None
        self.job = job
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self.process.stdin.flush()
        self.deadline = monotonic() + seconds

    def receive(self) -> dict[str, Any] | None:
        """The answer, None while it is incomplete.

        Raises:
            EOFError: The worker is gone.
        """
        chunk = os.read(self.fileno(), 1 << 16)
        if not chunk:
            raise EOFError
        self.unread += chunk
        if not self.unread.endswith(b"\n"):
            return None
        line, self.unread = self.unread, b""
        return json.loads(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class _Run:
    """One call of `map`: which tasks wait, which are under way, what came of the others."""

    def __init__(self, pool: WorkerPool, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> None:
        self.pool, self.function, self.tasks = pool, function, tasks
        self.waiting = deque(range(len(tasks)))
        self.retried: set[int] = set()
        self.done: dict[int, Outcome] = {}
        self.loads_lost = 0

    def outcomes(self) -> list[Outcome]:
        """Works until every task has an outcome; without tasks, until a worker has the function."""
        running = self.pool._running
        while len(self.done) < len(self.tasks) or not (self.done or any(map(self._is_ready, running))):
            self._give_out_work()
            busy = [worker for worker in running if worker.job != IDLE]
            patience = max(0.0, min(worker.deadline for worker in busy) - monotonic())
            readable = ready(busy, patience)
            for worker in busy:
                self._look_at(worker, worker.fileno() in readable)
        return [self.done[index] for index in range(len(self.tasks))]

    def _is_ready(self, worker: _Worker) -> bool:
        return worker.job != LOADING and worker.function == self.function

    def _give_out_work(self) -> None:
        running = self.pool._running
        while len(running) < min(self.pool.workers, max(1, len(self.tasks) - len(self.done))):
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
            late = monotonic() >= worker.deadline or worker.process.wait() == -signal.SIGPROF
            self._lose(worker, TIMEOUT if late else CRASH)
            return
        if reply is None:
            if monotonic() >= worker.deadline:
                self._lose(worker, TIMEOUT)
        elif worker.job == LOADING:
            worker.job = IDLE
            if reply["status"] != OK:
                failed, worker.function = worker.function, ""
                if failed == self.function:  # else it is the last map's, which ended without this worker
                    raise LoadError(f"cannot load {failed}: {reply['error']}")
        elif reply["status"] == MEMORY:  # what the task left behind may still be there: start afresh
            self._lose(worker, MEMORY)
        else:
            self.done[worker.job] = Outcome(reply["status"], reply.get("value"), reply.get("error", ""))
            worker.job = IDLE

    def _lose(self, worker: _Worker, status: str) -> None:
        """Ends the worker, and gives its task a second chance unless its time was up."""
        worker.kill()
        self.pool._running.remove(worker)
        if worker.job == LOADING:
            self.loads_lost += 1
            if status == TIMEOUT or self.loads_lost > self.pool.workers:
                raise LoadError(f"cannot load {self.function}: the worker {'hung' if status == TIMEOUT else 'died'}")
            return
        self._start()  # now, so that it is ready for the next call
        if status == TIMEOUT or worker.job in self.retried:
            self.done[worker.job] = Outcome(status)
        else:
            self.retried.add(worker.job)
            self.waiting.appendleft(worker.job)


def ready(workers: Sequence[_Worker], seconds: float) -> set[int]:
    """The descriptors of those that have answered or ended, waited for at most `seconds`."""
    waiting = select.poll()  # unlike select.select, for descriptors above 1023 too
    for worker in workers:
        waiting.register(worker.fileno(), select.POLLIN)
    return {descriptor for descriptor, _ in waiting.poll(math.ceil(1000 * seconds))}


def _stop(running: list[_Worker], pid: int) -> None:
    """Ends every worker, unless this process is a fork of the one they belong to."""
    if pid == os.getpid():
        for worker in running:
            worker.kill()
        running.clear()
