"""The ranks that Lightning starts: when one fails, all end within seconds. torchrun and srun see to their own."""

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

VARIABLE = "GRPO_RANK_0"  # in the environment of the ranks that Lightning starts: the process of rank 0
GRACE = 3.0  # seconds in which a rank must end after one that failed; 20 times as long after one that was asked to stop


class LaunchedRanks:
    """Surrounds the work of the ranks. When an exception leaves it, no other rank will print one."""

    def __enter__(self) -> None:
        self.others: list[Popen[Any]] = []
        self._lost, self._over = Event(), Event()
        self.launched = VARIABLE in os.environ and int(os.environ.get("LOCAL_RANK") or 0) > 0
        if not self.launched:
            os.environ[VARIABLE] = str(os.getpid())
        Thread(target=self._follow if self.launched else self._watch, daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, Exception):
            for process in self.others:
                with suppress(TimeoutExpired):
                    process.wait(20 * GRACE if error else None)
        elif self.launched:
            sleep(1)  # rank 0 ends this process meanwhile, if it fails likewise
        elif self.others and (type(error) is RuntimeError or type(error).__module__.startswith("torch")):
            self._lost.wait(GRACE)  # the error may only tell that a rank is gone
        if isinstance(error, Exception) and ranks.world_size() > 1:
            # The end of a process closes groups of NCCL, which may wait for a rank that is gone.
            late = Timer(3 * GRACE, os._exit, [1])
            late.daemon = True
            late.start()
        self._over.set()
        if not isinstance(error, SystemExit):
            self._leave(sys.exit)
        for process in self.others:
            process.kill()
        if not self.launched:
            os.environ.pop(VARIABLE, None)

    def _watch(self) -> None:
        """Ends rank 0, which may wait forever for a rank that is gone."""
        while not (any(process.poll() for process in self.others) or self._over.wait(0.1)):
            self.others += adopt_ranks()
        self._lost.set()
        asked = any(process.returncode in (EXIT_CODE, SUSPENDED) for process in self.others)
        if not self._over.wait(20 * GRACE if asked else GRACE):
            self._leave(os._exit)

    def _follow(self) -> None:
        """Ends this process when rank 0 is gone."""
        while os.getppid() == int(os.environ[VARIABLE]):
            sleep(0.1)
        os._exit(1)

    def _leave(self, leave: Callable[[int], Any]) -> None:
        """Ends all processes if another rank has failed."""
        for rank, process in enumerate(self.others, start=1):
            if code := process.poll():
                for other in self.others:
                    other.kill()
                if code < 0:  # it has printed nothing
                    name = signal.Signals(-code).name
                    print(f"grpo: error: rank {rank} was ended by {name} (out of memory?)", file=sys.stderr)
                leave(max(code, 1))
