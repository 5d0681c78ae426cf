"""A worker process: JSON lines in, JSON lines out. It is a script, so that it imports only what it is told to.

`python main.py MEMORY_MB SECONDS CPU_SECONDS` answers two requests. Each has a `number`, and is answered by a line
`{"status", "value" or "error", "number"}`:

- `{"load": FUNCTION, "path": SYS_PATH}` imports the function, named as for `module_of`. The value is the list of the
  arguments that it must be given.
- `{"task": TASK}` calls it with the items of a list, or with what `given` makes of a dict.

If FUNCTION is `async SECONDS FUNCTION`, it must be an `async def`, and TASK is a list of such dicts. The calls are
awaited together, each for at most SECONDS. The value is a list with one reply, as above, per dict.

The worker is a child of the process that is started. It ends with the pool: when stdin ends, or at the alarm that is
set during each task. Its parent then ends whatever the worker has started, and removes its temporary files.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ORPHAN_GRACE = 1.0  # seconds after the parent's deadline at which the kernel ends a task whose parent is gone
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
PACKAGE = str(Path(__file__).parents[1])


class Given(SimpleNamespace):
    """An object with attributes, which tells what it has when it is asked for another."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no `{name}`; there are {', '.join(sorted(self.__dict__))}")


def given(task: dict[str, Any]) -> Any:
    """An object with the keys of a dict as attributes; for `{"samples": [...]}` a list of such objects."""
    return [Given(**one) for one in task["samples"]] if "samples" in task else Given(**task)


def load(name: str) -> Callable[..., Any]:
    """The function with this name."""
    if name.startswith("async "):
        _, seconds, name = name.split(" ", 2)
        return together(load(name), float(seconds), name)
    function = getattr(*module_of(name))
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function


def module_of(path: str) -> tuple[ModuleType, str]:
    """The module and the name in it: `package.module.name`, `package.module:name` or `path/to/file.py:name`."""
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    return module, name


def together(function: Callable[..., Any], seconds: float, name: str) -> Callable[..., Any]:
    """A function that calls an `async def` for several tasks at once."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{name} is not an `async def`: only that can have several calls under way at once")
    import asyncio  # at the top it would double what a copy of the process costs, see `Instances`

    async def one(task: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds) as limit:
                return {"status": "ok", "value": await function(given(task))}
        except TimeoutError as error:
            return {"status": "timeout"} if limit.expired() else failure(error)
        except MemoryError:
            raise
        except Exception as error:
            return failure(error)

    async def every(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(one, tasks))

    return wraps(function)(lambda *tasks: event_loop().run_until_complete(every(list(tasks))))


def arguments(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a function must be given; none where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some built-in functions
        return []
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in rest]


def awaited(value: Any) -> Any:
    """The value; that of an `async def` is awaited."""
    return event_loop().run_until_complete(value) if inspect.isawaitable(value) else value


@cache
def event_loop() -> Any:
    """The event loop of all tasks, so that a user's module can keep a client open between them."""
    import asyncio

    return asyncio.new_event_loop()


def failure(error: BaseException) -> dict[str, Any]:
    """The reply for an exception, which names the line of the user's code that was reached last."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, "<")) and "/lib/python3" not in file:
            line = f"{Path(file).name}:{number}: "
    return {"status": "error", "error": f"{line}{type(error).__name__}: {error}"[:2000]}


def plain(value: Any) -> Any:
    """NumPy's and PyTorch's numbers and arrays as JSON has them."""
    return value.tolist() if hasattr(value, "tolist") else float(value)


def set_limits(megabytes: int | None) -> None:
    """Allows this process so much memory in addition to what is mapped now, and files of this size; None allows all."""
    used = {resource.RLIMIT_FSIZE: 0}
    if sys.platform == "linux":
        used[resource.RLIMIT_AS] = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, now in used.items():
        _, hard = resource.getrlimit(kind)
        soft = hard if megabytes is None else now + megabytes * 2**20
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def answer(action: Callable[[], Any], number: int = 0) -> bytes:
    """The result or the failure of `action`, for the request `number`, as a line of JSON.

    A lone surrogate, which neither files nor tokenizers take, becomes a question mark.
    """
    pid = os.getpid()
    try:
        reply = {"status": "ok", "value": action(), "number": number}
        line = json.dumps(reply, default=plain, ensure_ascii=False).encode("utf-8", "replace")
    except MemoryError:
        line = b'{"status": "memory", "error": "out of memory", "number": %d}' % number
    except BaseException as error:  # the task's sys.exit() ends the task, not the worker
        line = json.dumps(failure(error) | {"number": number}, ensure_ascii=False).encode("utf-8", "replace")
    if os.getpid() != pid:  # a fork that the action has made: the answer is for the process itself to give
        os._exit(0)
    return line + b"\n"


def ask_kernel(option: int, value: int) -> None:
    """Sets an option of this process, where the system knows it. Orphans become children of a subreaper."""
    if LIBC:
        LIBC.prctl(option, value, 0, 0, 0)


def kill(pid: int) -> None:
    """Kills a process and its group."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def end_strays(spared: Iterable[int] = ()) -> None:
    """Ends all children of this process but the spared, where the system tells them.

    A subreaper's are also the orphans of those that have ended.
    """
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    while file.exists() and (strays := {*map(int, file.read_text().split())}.difference(spared)):
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def serve() -> None:
    """Answers requests until stdin ends."""
    memory_mb, seconds, cpu_seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    # The protocol has its own descriptors: a task prints to stderr, and its stdin is empty.
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    functions: list[Callable[..., Any]] = []

    def handle(request: dict[str, Any]) -> Any:
        if "load" in request:
            set_limits(None)
            sys.path[:] = [*request["path"], os.getcwd()]
            functions[:] = [load(request["load"])]
            set_limits(memory_mb)
            return arguments(functions[0])
        task = request["task"]
        return awaited(functions[0](given(task)) if isinstance(task, dict) else functions[0](*task))

    for line in requests:
        request = json.loads(line)
        if "task" in request:
            signal.setitimer(signal.ITIMER_REAL, seconds + ORPHAN_GRACE)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # 0 sets no limit
        reply = answer(partial(handle, request), request["number"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply)
        replies.flush()


def supervise(worker: int) -> int:
    """Waits for the worker to end, or ends it at SIGTERM, and all that it has started. Returns its exit status."""
    for descriptor in (0, 1):  # the pool notices the worker's end by them
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    ended, status = 0, 0
    while ended != worker:
        if signal.sigwait(SIGNALS) == signal.SIGTERM:
            kill(worker)
        while (reaped := os.waitpid(-1, os.WNOHANG))[0] not in (0, worker):
            pass  # an orphan
        ended, status = reaped
    kill(worker)  # others of its group
    end_strays()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> None:
    """Starts a worker, and cleans up after it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ask_kernel(PR_SET_CHILD_SUBREAPER, 1)
    folder = tempfile.mkdtemp(prefix="grpo-worker-")
    if worker := os.fork():
        code = supervise(worker)
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(code)
    os.setsid()
    ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)  # when its parent ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    serve()


if __name__ == "__main__":
    main()
