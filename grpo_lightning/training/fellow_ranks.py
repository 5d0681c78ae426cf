"""Ranks fail together: what ends one of them ends all within seconds, and its message is the last on the console.

A rank that fails writes so into a file that the other ranks of the machine know. They may be in a collective that
would wait for half an hour. So a thread in each of them watches that file and the processes, and ends its rank.
The ranks of other machines are told by `fellow_nodes`.
"""

import contextlib
import ctypes
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from grpo_lightning.training.disk import write_whole
from grpo_lightning.training.fellow_nodes import FellowNodes, Meeting
from grpo_lightning.training.internals import adopt_ranks
from grpo_lightning.types import UsageError

VARIABLE = "GRPO_FELLOW_RANKS"
"""In the environment of ranks that Lightning starts: the process that started them, and the folder."""
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended."""
SUSPENDED = 75
"""Exit code of a run that SIGUSR1 has ended: to be continued. EX_TEMPFAIL of sysexits.h."""
LOOK = 0.25
"""Seconds between two looks at the file."""
GRACE = 3.0
"""Seconds for a rank to leave by itself, closing its files and loggers, before its process is ended."""

STARTED = time()
"""About when this process began."""

_LOST = re.compile(r"gloo|nccl|tcpstore|processgroup|connection (closed|reset|refused|was)|broken pipe", re.IGNORECASE)
"""Messages of torch when another rank is gone."""


@dataclass(slots=True)
class LastWords:
    """Why a run ends."""

    process: int
    """The process that failed first."""
    text: str
    """For the console."""
    code: int
    """The exit code."""
    final: bool
    """Whether that rank will add nothing."""


class FellowFailed(BaseException):
    """Another rank has failed. It is not an Exception, which code that contains the failures of rewards would catch."""


class FellowRanks:
    """This process among the ranks of its machine.

    Args:
        folder: Where a rank that fails leaves its message; known to all ranks of the machine. It is made by the first
            that writes to it, so that a run that is killed leaves none behind.
        rank: Index of this process among those of the machine.
        parent: The process that started this rank and prints for all; None if this one does.
        external: Whether something else, such as torchrun, has started all ranks. Then the one that fails prints.
        meeting: Where the ranks of several nodes meet; None if all are on this machine.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        parent: int | None = None,
        external: bool = False,
        meeting: Meeting | None = None,
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.parent = parent
        self.external = external
        self.children: list[subprocess.Popen[Any]] = []
        """The ranks that Lightning has started from here."""
        self._leaving = False
        self._adopting = threading.Lock()
        self._spoke = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.get_ident()
        if external:
            self._forget_an_earlier_start()
        self._watch = threading.Thread(target=self._look, name="fellow-ranks", daemon=True)
        self.nodes: FellowNodes | None = None
        """Those on other machines; their thread may end this process as soon as it runs."""
        if meeting is not None:
            self.nodes = FellowNodes(meeting, self._end_for)
        self._watch.start()

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.parent is None and not self.external and not self.children

    @property
    def _file(self) -> Path:
        return self.folder / "last_words.json"

    def first(self) -> LastWords | None:
        """The message of the first rank that failed, if one has."""
        try:
            return LastWords(**json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # not there, or not yet written to its end
            return None

    def _make_folder(self) -> None:
        """Makes the folder, unless the process that would remove it has ended."""
        if self.parent in (None, os.getppid()):
            self.folder.mkdir(mode=0o700, exist_ok=True)

    def _forget_an_earlier_start(self) -> None:
        """Removes the message of an earlier start in the same folder."""
        with contextlib.suppress(OSError):
            if self._file.stat().st_mtime < STARTED:
                self._file.unlink()

    def claim(self, text: str, code: int, process: int | None = None, final: bool = False) -> LastWords:
        """The last words of the run: these, unless another rank failed before."""
        words = LastWords(process or os.getpid(), text, code, final)
        try:
            self._make_folder()
            with self._file.open("x", encoding="utf-8") as file:
                file.write(json.dumps(asdict(words)))
            if self.nodes is not None:
                self.nodes.tell(text, code)
        except FileExistsError:
            known = self.first()
            if known is None or (known.process, known.final) != (words.process, False):
                return known or words
            write_whole(self._file, json.dumps(asdict(words)))
        except OSError:  # no folder, no disk: print it here
            pass
        return words

    def raised(self, error: BaseException) -> None:
        """Tells the other ranks at once that this one fails: closing it takes a while."""
        self._leaving = True
        self._adopt()
        if self.alone or is_of_a_lost_rank(error):
            return
        if isinstance(error, KeyboardInterrupt):
            self.claim(f"grpo: rank {self.rank} was interrupted", INTERRUPTED)
        elif isinstance(error, UsageError):
            self.claim(f"grpo: error: {error}", 2)
        elif not isinstance(error, FellowFailed | SystemExit):
            self.claim("".join(traceback.format_exception(error)).rstrip(), 1)

    def fail(self, text: str, code: int) -> int:
        """Prints why the run ends: the message of the rank that failed first.

        Returns:
            The exit code of all ranks.
        """
        self._leaving = True
        self._adopt()
        if self.alone:
            print(text, file=sys.stderr)
            return code
        if is_of_a_lost_rank(sys.exception()):
            if self.nodes is not None:
                self.nodes.haste()
            self._wait_for_words(2 * GRACE if self.nodes is None else self.nodes.patience)
        words = self.claim(text, code, final=True)
        if words.process != os.getpid() and not words.final:
            self._wait_for_words(GRACE, final=True)
            words = self.first() or words
        if self.parent is None and (not self.external or words.process == os.getpid()):
            self._speak(words)
        return words.code

    def leave(self, code: Any) -> None:
        """Notes whether a rank that ends with an exit code has failed."""
        words = self.first()
        if self.parent is not None and words is not None and words.process == os.getpid():
            self.fail(words.text, words.code)
        elif code in (None, 0, 128 + signal.SIGTERM, INTERRUPTED, SUSPENDED):
            with contextlib.suppress(OSError):  # the process that started all ranks may have ended first
                if code and not self.alone:
                    self._make_folder()
                    self.folder.joinpath(f"left-{os.getpid()}").touch()
        elif self.parent is not None:
            text = f"grpo: error: rank {self.rank} ended with exit code {code}"
            self.fail(text, code if isinstance(code, int) else 1)

    def finish(self) -> None:
        """Waits for the other ranks, which may still fail at the end.

        Raises:
            SystemExit: One did.
        """
        self._adopt()
        end = monotonic() + 3 * GRACE
        while self.children and monotonic() < end and any(child.poll() is None for child in self.children):
            sleep(LOOK / 5)
        if self.parent is None and not self.external and self.first() is not None:
            sys.exit(self.fail("", 1))

    def close(self) -> None:
        """Ends the watch."""
        if self.nodes is not None:
            self.nodes.close()
        self._over.set()
        self._watch.join()
        self._clean_up()

    def _wait_for_words(self, seconds: float, final: bool = False) -> None:
        end = monotonic() + seconds
        while monotonic() < end and not ((words := self.first()) and (words.final or not final)):
            sleep(LOOK / 5)

    def _speak(self, words: LastWords) -> None:
        """Ends the other ranks, and then prints why, once."""
        if self._spoke.acquire(blocking=False):
            for child in self.children:
                child.kill()
            for child in self.children:
                child.wait()
            print(words.text, file=sys.stderr, flush=True)

    def _look(self) -> None:
        """The thread: looks until the run is over."""
        seen, told = math.inf, False
        while not self._over.wait(LOOK):
            self._adopt()
            if self.parent is not None and os.getppid() != self.parent:
                self._end(1)  # the process that speaks for the run is gone
            words = self.first()
            if words is None:
                self._look_for_the_lost()
                continue
            seen = min(seen, monotonic())
            late = monotonic() - seen > GRACE
            mine = words.process == os.getpid()
            if not mine and (self.parent is not None or self.external):
                self._end(words.code)
            if mine and monotonic() - seen > 10 * GRACE:
                self._end(self.fail(words.text, words.code))
            if not mine and late and not (self._leaving and monotonic() - seen < 3 * GRACE):
                self._speak(words)
                self._end(words.code)
            if not (mine or told or self._leaving or words.code == INTERRUPTED):
                told = True
                raise_in(self._thread, FellowFailed)

    def _adopt(self) -> None:
        """Takes the processes over from Lightning, which would end this process by SIGKILL without a message."""
        with self._adopting:
            self.children += adopt_ranks()

    def _end_for(self, text: str, code: int) -> None:
        """Ends this rank for what has happened on another node."""
        words = self.claim(text, code, final=True)
        if words.process == os.getpid() and not self._leaving:
            raise_in(self._thread, FellowFailed)
            self._over.wait(GRACE)
        self._end(self.fail(text, code))

    def _end(self, code: int) -> None:
        if self.nodes is not None:
            self.nodes.close()
        self._clean_up()
        end_process(code)

    def _clean_up(self) -> None:
        if self.parent is None and not (self.external and (self.rank > 0 or self.first())):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _look_for_the_lost(self) -> None:
        """Claims the message for a rank that is gone without one: out of memory, or killed by somebody."""
        for rank, child in enumerate(self.children, start=1):
            code = child.poll()
            if code in (None, 0) or self.folder.joinpath(f"left-{child.pid}").exists():
                continue
            assert code is not None
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            memory = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
            self.claim(f"grpo: error: rank {rank} (process {child.pid}) {how}{memory}", 1, child.pid, final=True)


class FailTogether(Callback):
    """Tells the other ranks of an exception at once, so that none waits for a rank that is gone."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leaves the message for the other ranks."""
        if _current is not None:
            _current.raised(exception)


_current: FellowRanks | None = None


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """While the ranks of a run are at work: ends all of them when one fails.

    Raises:
        SystemExit: This rank or another one failed.
    """
    global _current
    folder, options = _folder_and_role()
    fellows = _current = FellowRanks(folder, **options)
    starts_ranks = fellows.parent is None and not fellows.external
    if starts_ranks:
        os.environ[VARIABLE] = f"{os.getpid()}:{folder}"
    try:
        yield
        fellows.finish()
    except SystemExit as stopped:
        fellows.leave(stopped.code)
        raise
    except (Exception, FellowFailed):
        if fellows.alone:
            raise
        sys.exit(fellows.fail(traceback.format_exc().rstrip(), 1))
    finally:
        fellows.close()
        _current = None
        if starts_ranks:
            os.environ.pop(VARIABLE, None)


def last_words(text: str, code: int) -> int:
    """Prints why the run ends on standard error, once for all ranks; returns the exit code."""
    if _current is None:
        print(text, file=sys.stderr)
        return code
    return _current.fail(text, code)


def _folder_and_role() -> tuple[Path, dict[str, Any]]:
    """The folder that the ranks of this machine share, and which of them this process is."""
    parent, _, folder = os.environ.get(VARIABLE, "").partition(":")
    rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    if parent == str(os.getppid()) and rank > 0:
        return Path(folder), {"rank": rank, "parent": os.getppid()}
    torchrun = [os.environ[key] for key in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT") if key in os.environ]
    slurm = [os.environ[key] for key in ("SLURM_JOB_ID", "SLURM_STEP_ID") if key in os.environ]
    if torchrun or (len(slurm) == 2 and int(os.environ.get("SLURM_NTASKS", 1)) > 1):
        names = [*(torchrun and [str(os.getppid())]), *torchrun, *slurm]
        names += [os.environ.get(key, "") for key in ("SLURM_RESTART_COUNT", "SLURM_NODEID", "MASTER_PORT")]
        shared = Path(tempfile.gettempdir(), "grpo-" + re.sub(r"[^\w]+", "-", "-".join(names)))
        shared.mkdir(mode=0o700, exist_ok=True)
        return shared, {"rank": rank, "external": True, "meeting": Meeting.from_environment()}
    if parent and rank > 0 and not Path("/proc", parent).exists() and Path("/proc").exists():
        end_process(1)  # the process that started this rank is gone already
    return Path(tempfile.gettempdir(), f"grpo-{secrets.token_hex(8)}"), {}


def is_of_a_lost_rank(error: BaseException | None) -> bool:
    """Whether `error` only tells that another rank is gone."""
    if isinstance(error, FellowFailed):
        return True
    from_torch = type(error) is RuntimeError or type(error).__module__.startswith("torch")
    return from_torch and _LOST.search(str(error)) is not None


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raises `kind` in a thread as soon as it runs Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def end_process(code: int) -> None:
    """Ends this process at once, whatever its threads wait for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
