"""A process that copies itself: each copy holds a copy of an object, and answers calls of its methods.

`python instance.py MEMORY_MB` answers JSON lines on the socket that is its stdin, each by a line
`{"status", "value" or "error", "number"}`:

- `{"load": PICKLE, "path": SYS_PATH}` makes the object, from a pickle in base64.
- `{"start": [SEED, ...]}`, which brings sockets along, starts copies that answer there. The value is their process ids.
- `{"end": [PID, ...]}` kills copies, and every process that they have started. The value is their exit codes.

A copy answers `{"call": METHOD, "arguments": [...], "cpu_seconds": SECONDS, "number": NUMBER}`, and ends where a call
takes more. Its random numbers begin at SEED; its temporary files are in a separate folder, which is removed with it.
When the socket of the first process ends, all processes end.
"""

import base64
import contextlib
import functools
import gc
import importlib
import json
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4] / "sandbox"))
worker: Any = importlib.import_module("main")
del sys.path[0]

MAX_SOCKETS = 253
"""Sockets that Linux passes in one message."""


class Origin:
    """The process that copies itself. A copy may take `memory_mb` MiB beside the memory of the object's imports."""

    def __init__(self, control: socket.socket, memory_mb: int) -> None:
        self.control = control
        self.memory_mb = memory_mb
        self.object: Any = None
        """The object that copies hold."""
        self.folder = tempfile.mkdtemp(prefix="grpo-environments-")
        self.folder_by_pid: dict[int, str] = {}
        """The folder of each copy's temporary files."""

    def run(self) -> None:
        """Answers requests until the socket ends; then ends all copies and removes their files."""
        line = b""
        channels: list[socket.socket] = []
        try:
            while True:
                # Some bytes of a line, and the sockets that come with them.
                data, descriptors, *_ = socket.recv_fds(self.control, 1 << 16, MAX_SOCKETS)
                channels += [socket.socket(fileno=descriptor) for descriptor in descriptors]
                if not data:
                    break
                line += data
                if line.endswith(b"\n"):
                    request = json.loads(line)
                    handle = functools.partial(self.handle, request, channels)
                    self.control.sendall(worker.answer(handle, request["number"]))
                    line = b""
                    channels = []
        except ConnectionError:
            pass
        finally:
            self.end([*self.folder_by_pid])
            shutil.rmtree(self.folder, ignore_errors=True)

    def handle(self, request: dict[str, Any], channels: list[socket.socket]) -> Any:
        """Does what a request says, and returns the value of its answer."""
        if "load" in request:
            sys.path[:] = [*request["path"], os.getcwd()]
            self.object = pickle.loads(base64.b64decode(request["load"]))
            gc.freeze()  # copies then go on sharing memory
            return None
        if "start" in request:
            return [self.start(seed, channels) for seed in request["start"]]
        return self.end(request["end"])

    def start(self, seed: int, channels: list[socket.socket]) -> int:
        """Starts a copy, which answers on the first of the channels, and returns its process id."""
        folder = tempfile.mkdtemp(dir=self.folder)
        pid = os.fork()
        if pid:
            channels.pop(0).close()
            self.folder_by_pid[pid] = folder
            return pid

        # Here the copy runs.
        with contextlib.suppress(BaseException):
            # It keeps no socket of others, or they would not end when their owner closes them.
            channel, *later_channels = channels
            for later_channel in later_channels:
                later_channel.close()
            os.setsid()
            # It dies with its parent, and becomes the parent of processes that its processes leave behind.
            worker.ask_kernel(worker.PR_SET_PDEATHSIG, signal.SIGKILL)
            worker.ask_kernel(worker.PR_SET_CHILD_SUBREAPER, 1)
            self.control.close()
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed % 2**32)
            worker.set_limits(self.memory_mb)
            serve(self.object, channel)
        os._exit(0)

    def end(self, pids: list[int]) -> list[int]:
        """Kills copies, and returns their exit codes. Processes that they started die too, in any process group."""
        exit_codes = []
        for pid in pids:
            worker.kill(pid)
            exit_codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        worker.end_strays(self.folder_by_pid)
        for folder in map(self.folder_by_pid.pop, pids):
            shutil.rmtree(folder, ignore_errors=True)
        return exit_codes


def serve(object: Any, channel: socket.socket) -> None:
    """Answers calls of the object's methods until the socket ends."""
    for line in channel.makefile("rb"):
        request = json.loads(line)

        def call(request: dict[str, Any] = request) -> Any:
            return worker.awaited(getattr(object, request["call"])(*request["arguments"]))

        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        reply = worker.answer(call, request["number"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(reply)


def main() -> None:
    """Serves until the socket ends."""
    worker.ask_kernel(worker.PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # text that an object prints is no answer
    Origin(control, int(sys.argv[1])).run()


if __name__ == "__main__":
    main()
