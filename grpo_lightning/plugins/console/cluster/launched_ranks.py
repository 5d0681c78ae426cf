"""The ranks that Lightning starts: when a rank fails, all end within seconds. torchrun and srun do so themselves."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from subprocess import Popen, TimeoutExpired
from threading import Event, Thread, Timer
from time import sleep
from typing import Any

from grpo_lightning import ranks
from grpo_lightning.plugins.console.cluster.launch_internals import adopt_ranks
from grpo_lightning.training.callbacks.checkpoint import EXIT_CODE, SUSPENDED

VARIABLE = "GRPO_RANK_0"
"""Process id of rank 0, in the environment of the ranks that Lightning starts."""
GRACE = 3.0
"""Seconds in which a rank must end after a failed rank; 20 times as long after a rank that was stopped by a signal."""


class LaunchedRanks:
    """Surrounds the work of the ranks. When an exception leaves it on rank 0, no other rank prints an exception."""

    def __enter__(self) -> None:
        self.processes: list[Popen[Any]] = []
        """The ranks that this process has started."""
        self._is_lost = Event()
        self._is_over = Event()
        self.launched = VARIABLE in os.environ and int(os.environ.get("LOCAL_RANK") or 0) > 0
        """True in a rank that another process has started."""
        if not self.launched:
            os.environ[VARIABLE] = str(os.getpid())
        Thread(target=self._follow if self.launched else self._watch, daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        # Who speaks? Without a failure the ranks end by themselves; a failure may be another rank's.
        if not isinstance(error, Exception):
            for process in self.processes:
                with suppress(TimeoutExpired):
                    process.wait(20 * GRACE if error else None)
        elif self.launched:
            sleep(1)  # rank 0 ends this process meanwhile, if it fails likewise
        elif self.processes and (type(error) is RuntimeError or type(error).__module__.startswith("torch")):
            self._is_lost.wait(GRACE)  # the error may mean nothing but that a rank is gone
        if isinstance(error, Exception) and ranks.world_size() > 1:
            # The end of a process closes groups of NCCL, which may wait for a rank that is gone.
            exit_timer = Timer(3 * GRACE, os._exit, [1])
            exit_timer.daemon = True
            exit_timer.start()
        self._is_over.set()

        # A rank that has failed decides the exit code.
        if not isinstance(error, SystemExit):
            self._leave(sys.exit)
        for process in self.processes:
            process.kill()
        if not self.launched:
            os.environ.pop(VARIABLE, None)

    def _watch(self) -> None:
        """Ends rank 0, which may wait forever for a rank that is gone."""
        while not (any(process.poll() for process in self.processes) or self._is_over.wait(0.1)):
            self.processes += adopt_ranks()
        self._is_lost.set()
        is_stopped = any(process.returncode in (EXIT_CODE, SUSPENDED) for process in self.processes)
        if not self._is_over.wait(20 * GRACE if is_stopped else GRACE):
            self._leave(os._exit)

    def _follow(self) -> None:
        """Ends this process when rank 0 is gone."""
        while os.getppid() == int(os.environ[VARIABLE]):
            sleep(0.1)
        os._exit(1)

    def _leave(self, leave: Callable[[int], Any]) -> None:
        """Ends all processes if another rank has failed; `leave` ends this process with an exit code."""
        for rank, failed in enumerate(self.processes, start=1):
            if code := failed.poll():
                for process in self.processes:
                    process.kill()
                if code < 0:  # a signal ended the rank before it could print
                    name = signal.Signals(-code).name
                    print(f"grpo: error: rank {rank} was ended by {name} (out of memory?)", file=sys.stderr)
                leave(max(code, 1))
