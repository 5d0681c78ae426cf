"""Worker processes that can be killed. They run the code that parses model output, and the user's own functions."""

import math
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from grpo_lightning.sandbox.worker import IDLE, LOADING, Outcome, Worker, settled
from grpo_lightning.types import Status, require

WAITING = 10.0
"""A call that may wait for something is ended after this many times its CPU seconds."""
MACHINE_SECONDS = 30.0
"""Seconds for which a machine may be too busy to run a task that never waits."""


class Closed(BaseException):
    """Raised in a thread that waits for a pool if another thread closes it. As an interrupt, it fails no task."""


class LoadError(RuntimeError):
    """Raised if a worker cannot import the function; the message holds the worker's error."""


def inside(function: str, beside: str = __file__) -> str:
    """Returns a pool's name of a function such as `patterns.ends`, in the folder `inside/` beside a file."""
    module, name = function.split(".")
    return f"{Path(beside).parent / 'inside' / module}.py:{name}"


class WorkerPool:
    """Runs a function in separate processes with limits on time and memory.

    The processes start at the first task, with exec and not fork: CUDA and threads here do not affect them, and the
    user's `__main__` is not imported again. A task whose worker is lost is tried once more in a new worker. What a
    worker has started, and its temporary files, end with it.

    Args:
        num_workers: Number of processes.
        timeout: Seconds per task; importing the function does not count. A task gets less done in them where the
            machine is busy, so nothing that must be repeatable may reach them: see `computing`.
        memory_limit_mb: Memory per worker in MiB, in addition to what its imports need (Linux only). No file that it
            writes may be larger.
        cpu_seconds: CPU seconds per task; None sets no limit. Unlike the seconds of `timeout`, they do not depend on
            how busy the machine is.
    """

    def __init__(
        self, num_workers: int = 2, timeout: float = 2.0, memory_limit_mb: int = 1024, cpu_seconds: float | None = None
    ) -> None:
        limits = {
            "num_workers": num_workers,
            "timeout": timeout if cpu_seconds is None else cpu_seconds,
            "memory_limit_mb": memory_limit_mb,
        }
        for key, value in limits.items():
            require(0 < value < math.inf, f"{key}={value}: give a number above 0")
        self.num_workers = num_workers
        self.timeout = timeout
        self.memory_limit_mb = memory_limit_mb
        self.cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._closing = False
        self._running: list[Worker] = []
        self._pid = 0

    @classmethod
    def computing(cls, num_workers: int, cpu_seconds: float, memory_limit_mb: int = 1024) -> "WorkerPool":
        """Makes a pool for tasks that compute and never wait: their outcomes do not depend on a busy machine."""
        return cls(num_workers, WAITING * cpu_seconds + MACHINE_SECONDS, memory_limit_mb, cpu_seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerPool, (self.num_workers, self.timeout, self.memory_limit_mb, self.cpu_seconds)

    def load(self, function: str) -> list[str]:
        """Returns the names of a function's required arguments. Raises LoadError if a worker cannot import it.

        The function is `package.module.function`, `package.module:function` or `path/to/file.py:function`.
        """
        return self._run(function, [])[0].value

    def map(self, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> list[Outcome]:
        """Returns the outcome of `function`, named as for `load`, for each task, in order. Tasks run in parallel.

        A task is made of JSON values. A list holds the arguments. A dict becomes one argument with these attributes,
        `{"samples": [...]}` becomes a list of such objects, and `{"keywords": {...}}` gives the arguments by name.

        Raises:
            LoadError: A worker cannot import the function.
            Closed: Another thread has closed the pool.
        """
        return self._run(function, tasks) if tasks else []

    def close(self) -> None:
        """Ends the processes, and a `map` in another thread; the next task starts new ones."""
        self._closing = True
        with self._lock:
            self._closing = False
            _stop(self._running)

    def _run(self, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> list[Outcome]:
        with self._lock:
            # At first, and after a fork: then the workers belong to the other process.
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._running.clear()
                weakref.finalize(self, _stop, self._running)
            try:
                return _Run(self, function, tasks).outcomes()
            except BaseException:
                _stop(self._running)
                raise


class _Run:
    """One call of `map`: the tasks that wait, the tasks under way, and the outcomes."""

    def __init__(self, pool: WorkerPool, function: str, tasks: Sequence[list[Any] | dict[str, Any]]) -> None:
        self.pool = pool
        self.function = function
        self.tasks = tasks
        self.waiting = deque(range(len(tasks)))
        self.retried: set[int] = set()
        self.outcome_by_index: dict[int, Outcome] = {}
        self.num_lost_loads = 0

    def outcomes(self) -> list[Outcome]:
        """Waits until every task has an outcome, and returns the outcomes; without tasks, the outcome of loading."""
        while not (outcomes := self._outcomes_if_complete()):
            if self.pool._closing:
                raise Closed
            self._give_out_work()
            busy = [worker for worker in self.pool._running if worker.job != IDLE]
            for worker, outcome in settled(busy).items():
                self._settle(worker, outcome)
        return outcomes

    def _outcomes_if_complete(self) -> list[Outcome]:
        """Returns the outcomes if every task has one; else an empty list."""
        if self.tasks:
            is_complete = len(self.outcome_by_index) == len(self.tasks)
            return [self.outcome_by_index[index] for index in range(len(self.tasks))] if is_complete else []
        loaded = (worker for worker in self.pool._running if worker.job != LOADING)
        return [worker.loaded for worker in loaded if worker.function == self.function]

    def _give_out_work(self) -> None:
        running = self.pool._running
        while len(running) < min(self.pool.num_workers, max(1, len(self.tasks) - len(self.outcome_by_index))):
            self._start()
        for worker in running:
            if worker.job == IDLE and worker.function != self.function:
                worker.load(self.function)
            elif worker.job == IDLE and self.waiting:
                worker.job = self.waiting.popleft()
                worker.send({"task": self.tasks[worker.job]}, self.pool.timeout)

    def _start(self) -> None:
        self.pool._running.append(Worker(self.pool.timeout, self.pool.memory_limit_mb, self.pool.cpu_seconds))
        self.pool._running[-1].load(self.function)

    def _settle(self, worker: Worker, outcome: Outcome) -> None:
        if outcome.status == Status.CRASH:
            timed_out = monotonic() >= worker.deadline
            # It may have answered nonsense, and run on.
            worker.kill()
            timed_out |= worker.process.returncode == 128 + signal.SIGPROF
            self._lose(worker, Status.TIMEOUT if timed_out else Status.CRASH)
        elif outcome.status == Status.TIMEOUT:
            self._lose(worker, Status.TIMEOUT)
        elif worker.job == LOADING:
            worker.job, worker.loaded = IDLE, outcome
            if outcome.status != Status.OK:
                function, worker.function = worker.function, ""
                # Another function is from the previous map, which ended without this worker.
                if function == self.function:
                    raise LoadError(f"cannot load {function}: {outcome.error}")
        elif outcome.status == Status.MEMORY:
            # The task may have left much behind: start a new worker.
            self._lose(worker, Status.MEMORY)
        else:
            self.outcome_by_index[worker.job] = outcome
            worker.job = IDLE

    def _lose(self, worker: Worker, status: str) -> None:
        """Kills the worker, and tries its task again unless its time was up."""
        worker.kill()
        self.pool._running.remove(worker)
        timed_out = status == Status.TIMEOUT
        if worker.job == LOADING:
            self.num_lost_loads += 1
            if timed_out or self.num_lost_loads > self.pool.num_workers:
                raise LoadError(f"cannot load {self.function}: the worker {'hung' if timed_out else 'died'}")
            return
        # Started at once, the new worker is ready for the next call.
        self._start()
        if timed_out or worker.job in self.retried:
            self.outcome_by_index[worker.job] = Outcome(status)
        else:
            self.retried.add(worker.job)
            self.waiting.appendleft(worker.job)


def _stop(running: list[Worker]) -> None:
    """Kills every worker. In a fork of the process that started the workers it does nothing to them, as Popen sees."""
    for worker in running:
        worker.kill()
    running.clear()
