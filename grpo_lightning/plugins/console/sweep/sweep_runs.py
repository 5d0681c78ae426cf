"""Makes runs in processes of their own, several at a time, and ends them with the sweep."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_lightning.plugins.console.sweep.experiment import ArmRun
from grpo_lightning.types import UsageError

GRACE_SECONDS = 20.0
"""Seconds for which a run may end by itself after SIGTERM."""


class Interrupted(BaseException):
    """Raised where SIGTERM or SIGINT ends the sweep."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Returns a context in which no other sweep writes into the folder. Raises UsageError if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".sweep.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{folder}: another sweep is making these runs. Wait for it, or give --out") from error
        yield


class Children:
    """The processes of the runs under way; none outlives the sweep.

    Args:
        workers: Processes at a time.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._has_ended = False

    def call(self, args: Sequence[str], log: Path) -> int:
        """Returns the exit status of `grpo` with one thread; `log` gets what it prints."""
        # PYTHONPATH for classes by FILE.CLASS. Idle threads sleep, and leave the cores to the other runs.
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", "grpo_lightning", *args]
        with log.open("w") as file:
            with self._lock:
                if self._has_ended:
                    return -signal.SIGTERM
                # In a session of its own, a run gets its signal from the sweep alone.
                process = subprocess.Popen(
                    command, env=os.environ | variables, stdout=file, stderr=file, start_new_session=True
                )
                self._processes.add(process)
            status = process.wait()
            with self._lock:
                self._processes.discard(process)
            return status

    def end(self) -> None:
        """Ends every process: with SIGTERM, and after some seconds with SIGKILL."""
        with self._lock:
            self._has_ended = True
            processes = [*self._processes]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def map(self, function: Callable[[ArmRun], Any], runs: Sequence[ArmRun]) -> Generator[tuple[ArmRun, Any]]:
        """Yields each run with the function's result, as they end. On SIGTERM and SIGINT all processes end."""

        def interrupt(*_: object) -> None:
            raise Interrupted

        previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with ThreadPoolExecutor(self.workers) as pool:
                run_of_future = {pool.submit(function, run): run for run in runs}
                try:
                    for future in as_completed(run_of_future):
                        yield run_of_future[future], future.result()
                except BaseException:
                    # A second signal does not keep a run alive.
                    for number in previous:
                        signal.signal(number, signal.SIG_IGN)
                    pool.shutdown(wait=False, cancel_futures=True)
                    self.end()
                    raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def last_line(log: Path) -> str:
    """Returns the last line of a log that is not blank."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def refused(runs: Sequence[ArmRun], children: Children, folder: Path) -> dict[str, str]:
    """Returns why `grpo` refuses the options of arms, by the names of the arms. Of each arm the first run is tried."""
    first_runs = list({run.arm: run for run in reversed(runs)}.values())

    def reason(run: ArmRun) -> str:
        log = folder / f".{run.folder.parent.name}.options.txt"
        status = children.call([*run.args, "--print_config"], log)
        text = last_line(log) if status else ""
        log.unlink()
        return text

    return {run.arm: text for run, text in children.map(reason, first_runs) if text}


def train(run: ArmRun, children: Children) -> tuple[float, str]:
    """Makes one run anew, its output in log.txt; returns the seconds and, if it failed, the reason."""
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    started = time.perf_counter()
    status = children.call(run.args, run.log)
    seconds = time.perf_counter() - started
    if status:
        return seconds, f"{last_line(run.log)} (exit status {status})"
    run.marker.write_text(json.dumps({"arguments": run.args, "seconds": round(seconds, 1)}, indent=2))
    return seconds, ""


def make_runs(runs: Sequence[ArmRun], children: Children) -> dict[str, str]:
    """Makes the runs, and prints a line per run. Returns by name why runs failed."""
    failures: dict[str, str] = {}
    with closing(children.map(lambda run: train(run, children), runs)) as results:
        for count, (run, (seconds, reason)) in enumerate(results, start=1):
            outcome = f"failed: {reason}. See {run.log}" if reason else f"{seconds:.0f} s"
            print(f"{count}/{len(runs)} {run.name}: {outcome}", flush=True)
            if reason:
                failures[run.name] = reason
    return failures
