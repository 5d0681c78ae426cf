"""A process that copies itself: each copy holds an object of its own, and answers calls of its methods.

`python instance.py MEMORY_MB` answers JSON lines on the socket that is its stdin, each by a line
`{"status", "value" or "error", "number"}`:

- `{"load": PICKLE, "path": SYS_PATH}` makes the object, from a pickle in base64.
- `{"start": [SEED, ...]}`, which brings sockets along, starts copies that answer there. The value is their process ids.
- `{"end": [PID, ...]}` kills copies, and every process that they have started. The value is their exit codes.

A copy answers `{"call": METHOD, "arguments": [...], "cpu_seconds": SECONDS, "number": NUMBER}`, and ends where a call
takes more. Its random numbers begin at SEED; its temporary files are in a folder of its own, which is removed with it.
When that socket ends, everything ends.
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

MAX_SOCKETS = 253  # the most that Linux passes in one message


class Origin:
    """The process that copies itself. A copy may take `memory_mb` MiB beside what the object's imports need."""

    def __init__(self, control: socket.socket, memory_mb: int) -> None:
        self.control = control
        self.memory_mb = memory_mb
        self.object: Any = None
        self.folder = tempfile.mkdtemp(prefix="grpo-environments-")
        self.folders: dict[int, str] = {}  # of each copy, by its process id

    def run(self) -> None:
        """Answers requests until the socket ends; then nothing is left."""
        line, channels = b"", list[socket.socket]()
        try:
            while True:
                # The next part of a line, and the sockets that come with it.
                data, descriptors, *_ = socket.recv_fds(self.control, 1 << 16, MAX_SOCKETS)
                channels += [socket.socket(fileno=descriptor) for descriptor in descriptors]
                if not data:
                    break
                line += data
                if line.endswith(b"\n"):
                    request = json.loads(line)
                    handle = functools.partial(self.handle, request, channels)
                    self.control.sendall(worker.answer(handle, request["number"]))
                    line, channels = b"", []
        except ConnectionError:
            pass
        finally:
            self.end([*self.folders])
            shutil.rmtree(self.folder, ignore_errors=True)

    def handle(self, request: dict[str, Any], channels: list[socket.socket]) -> Any:
        """The answer to a request."""
        if "load" in request:
            sys.path[:] = [*request["path"], os.getcwd()]
            self.object = pickle.loads(base64.b64decode(request["load"]))
            gc.freeze()  # so that copies go on sharing memory
            return None
        if "start" in request:
            return [self.start(seed, channels) for seed in request["start"]]
        return self.end(request["end"])

    def start(self, seed: int, channels: list[socket.socket]) -> int:
        """The process id of a new copy, which takes the first of the channels."""
        folder = tempfile.mkdtemp(dir=self.folder)
        pid = os.fork()
        if pid:
            channels.pop(0).close()
            self.folders[pid] = folder
            return pid
        with contextlib.suppress(BaseException):
            channel, *others = channels
            for other in others:
                other.close()
            os.setsid()
            worker.ask_kernel(worker.PR_SET_PDEATHSIG, signal.SIGKILL)  # when this process ends
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
        """Kills copies, and what they have started, even if it left their process group. Returns their exit codes."""
        exit_codes = []
        for pid in pids:
            worker.kill(pid)
            exit_codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        worker.end_strays(self.folders)
        for folder in map(self.folders.pop, pids):
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
    os.dup2(2, 1)  # what an object prints is no answer
    Origin(control, int(sys.argv[1])).run()


if __name__ == "__main__":
    main()
