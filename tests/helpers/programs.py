"""`grpo` in processes of its own, forked from one that has made the imports, which are most of what a small run costs.

What a fork shares with the others, and a new interpreter does not, is the seed of Python's hashes. So some tests start
new interpreters: those of invariance, SLURM and some of sharding. A fork leaves out the trial of the engine too
(`helpers.preloaded`).
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count as count_from
from pathlib import Path
from threading import _shutdown as join_threads  # type: ignore[attr-defined]
from typing import Any, ClassVar, NoReturn
from unittest import mock

from helpers.paths import environment
from helpers.waiting import LIMIT

PORTS = count_from(20_000 + os.getpid() * 1009 % 12_000)
"""A port for the ranks of each program, below those that the system gives away, as to Lightning."""

HERE = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Several processes at the same time on two cores, without a network."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["helpers.preloaded"])


class Program:
    """`python -m grpo_lightning ARGUMENTS` as it runs, with the ranks that it starts.

    Args:
        arguments: Subcommand and options.
        folder: The working directory.
        anew: Whether it is a new interpreter instead of a fork; and so are its ranks.
        together: Whether `errors` has what goes to standard output as well, in order.
        more: Variables of its environment.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, anew: bool = False, together: bool = False, **more: str
    ) -> None:
        said = Path(tempfile.mkdtemp(prefix="program-", dir=folder.parent))
        self._said = [said / "errors" if together else said / "output", said / "errors"]
        for path in self._said:  # there before the process is: a test may end it at once
            path.touch()
        variables = environment(**{"MASTER_PORT": str(next(PORTS))} | HERE | more)
        self._process: Any
        if anew:
            command = [sys.executable, "-m", "grpo_lightning", *arguments]
            with open(self._said[0], "a") as output, open(self._said[1], "a") as errors:
                self._process = subprocess.Popen(
                    command, stdout=output, stderr=errors, cwd=folder, env=variables, start_new_session=True
                )
        else:
            with mock.patch.dict(os.environ, variables):
                self._process = FORKS.Process(target=_begin, args=(list(arguments), str(folder), variables, self._said))
                self._process.start()

    @property
    def pid(self) -> int:
        """The process; it leads a session, of which its ranks are."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What it has written to standard output so far."""
        return self._said[0].read_text()

    @property
    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._said[1].read_text()

    def wait(self, seconds: float = LIMIT) -> int:
        """The exit code, minus the number of the signal that ended it.

        Raises:
            TimeoutExpired: It is still running.
        """
        if isinstance(self._process, subprocess.Popen):
            return self._process.wait(seconds)
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("grpo", seconds, self.output, self.errors)
        return self._process.exitcode

    def kill(self) -> None:
        """Ends it by SIGKILL, and waits for its end: else a later test is blamed for an unclosed process."""
        self._process.kill()
        self.wait()


@contextmanager
def programs(runs: dict[str, list[str]], folder: Path, **options: Any) -> Iterator[dict[str, Program]]:
    """Runs that all start at the same time, and are killed at the end if they are still there."""
    started = {}
    try:
        for name, arguments in runs.items():
            started[name] = Program(arguments, folder, **options)
        yield started
    finally:
        for program in started.values():
            program.kill()


def succeed(runs: dict[str, list[str]], folder: Path, **options: Any) -> None:
    """Waits for runs that all start at the same time; none fails."""
    with programs(runs, folder, **options) as started:
        for name, program in started.items():
            assert program.wait() == 0, f"{name}: {program.errors[-3000:]}"


class _Rank(subprocess.Popen[Any]):
    """A rank that Lightning starts: a child of this process that has waited for its arguments since before the run."""

    waiting: ClassVar[list[tuple[int, int]]] = []
    """Process and the end to write to of each that waits."""

    @classmethod
    def make(cls, count: int) -> None:
        """Forks ranks, while this process has one thread."""
        for _ in range(count):
            reads, writes = os.pipe()
            pid = os.fork()
            if pid == 0:
                for _, other in [*cls.waiting, (0, writes)]:
                    os.close(other)
                with os.fdopen(reads, "rb") as pipe:
                    said = pipe.read()
                if not said:  # the run needed no ranks, or is gone
                    os._exit(0)
                _become(*pickle.loads(said))
            os.close(reads)
            cls.waiting.append((pid, writes))

    def _execute_child(self, *given: Any) -> None:
        command, variables = list(given[0]), given[6]
        assert command[:3] == [sys.executable, "-m", "grpo_lightning.__main__"], command
        self.pid, writes = self.waiting.pop(0)
        self._child_created = True
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(pickle.dumps((command[3:], dict(variables))))


def _begin(arguments: list[str], folder: str, variables: dict[str, str], said: list[Path]) -> NoReturn:
    """A fork of the process with the imports: makes it one that a shell has started."""
    os.setsid()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, path in zip((1, 2), said, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    devices = [int(given.partition("=")[2]) for given in arguments if given.startswith("--trainer.devices=")]
    _Rank.make(devices[-1] - 1 if devices else 0)
    from lightning.pytorch.strategies.launchers import subprocess_script

    subprocess_script.subprocess = mock.Mock(Popen=_Rank)
    _become(arguments, variables)


def _become(arguments: list[str], variables: dict[str, str]) -> NoReturn:
    """Does what `python -m grpo_lightning` does behind its imports."""
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    import grpo_lightning.__main__ as program

    os.environ.clear()
    os.environ.update(variables)
    rank_zero_only.rank = _get_rank() or 0  # found by the import, otherwise
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = [str(program.__file__), *arguments]
    sys.path.insert(0, "")
    sys.modules["__main__"] = program
    _leave(program.main)


def _leave(main: Callable[[], None]) -> NoReturn:
    """Ends this process as an interpreter ends after `main`."""
    code: Any = 0
    try:
        main()
    except SystemExit as stopped:
        code = stopped.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    join_threads()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
