"""A worker process: JSON lines in, JSON lines out. It is a script, so that it imports only what its requests need.

`python main.py MEMORY_MB SECONDS CPU_SECONDS` answers two kinds of requests. Each has a `number`, and the answer is a
line `{"status", "value" or "error", "number"}`:

- `{"load": FUNCTION, "path": SYS_PATH}` imports the function, named as for `module_of`. The value is the list of its
  required arguments.
- `{"task": TASK}` calls it with the items of a list, with what `argument_of` makes of a dict, or, for a dict
  `{"keywords": {...}}`, with these arguments by name. An argument that is a dict becomes an object with attributes.

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

ORPHAN_GRACE = 1.0
"""Seconds after the parent's deadline at which the kernel ends a task whose parent is gone."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
PACKAGE = str(Path(__file__).parents[1])


class Argument(SimpleNamespace):
    """An object with attributes; the error for a missing attribute lists the others."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no `{name}`; there are {', '.join(sorted(self.__dict__))}")


def argument_of(task: dict[str, Any]) -> Any:
    """Returns an object with the keys of a dict as attributes; for `{"samples": [...]}` a list of such objects."""
    return [Argument(**sample) for sample in task["samples"]] if "samples" in task else Argument(**task)


def attributes_of(value: Any) -> Any:
    """Returns a value of JSON; a dict becomes an object with its keys as attributes."""
    return Argument(**value) if isinstance(value, dict) else value


def load(name: str) -> Callable[..., Any]:
    """Returns the function with this name."""
    if name.startswith("async "):
        _, seconds, name = name.split(" ", 2)
        return together(load(name), float(seconds), name)
    function = getattr(*module_of(name))
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function


def module_of(path: str) -> tuple[ModuleType, str]:
    """Returns the module of a path, and the name in it.

    A path is `package.module.name`, `package.module:name` or `path/to/file.py:name`.
    """
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
    """Returns a function that calls an `async def` for several tasks at once."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{name} is not an `async def`: only that can have several calls under way at once")
    # An import at the top would double the memory that a copy of the process costs: copies run environments.
    import asyncio

    async def reply_to(task: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds) as limit:
                return {"status": "ok", "value": await function(argument_of(task))}
        except TimeoutError as error:
            return {"status": "timeout"} if limit.expired() else failure(error)
        except MemoryError:
            raise
        except Exception as error:
            return failure(error)

    async def replies_to(tasks: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(reply_to, tasks))

    return wraps(function)(lambda *tasks: event_loop().run_until_complete(replies_to(tasks)))


def arguments(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the required arguments of a function; none if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = (parameter for parameter in parameters if parameter.default is parameter.empty)
    return [parameter.name for parameter in required if parameter.kind not in variadic]


def awaited(value: Any) -> Any:
    """Returns the value, after waiting for it if it comes from an `async def`."""
    return event_loop().run_until_complete(value) if inspect.isawaitable(value) else value


@cache
def event_loop() -> Any:
    """Returns the event loop of all tasks, so that a user's module can keep a client open between tasks."""
    import asyncio

    return asyncio.new_event_loop()


def failure(error: BaseException) -> dict[str, Any]:
    """Returns the reply for an exception, which names the line of the user's code that was reached last."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, "<")) and "/lib/python3" not in file:
            line = f"{Path(file).name}:{number}: "
    return {"status": "error", "error": f"{line}{type(error).__name__}: {error}"[:2000]}


def plain(value: Any) -> Any:
    """Turns numbers and arrays of NumPy and PyTorch into JSON's."""
    return value.tolist() if hasattr(value, "tolist") else float(value)


def set_limits(megabytes: int | None) -> None:
    """Limits the size of files, and the memory beside what is mapped now, to `megabytes`; None sets no limit."""
    used_bytes = {resource.RLIMIT_FSIZE: 0}
    if sys.platform == "linux":
        used_bytes[resource.RLIMIT_AS] = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, num_bytes in used_bytes.items():
        _, hard = resource.getrlimit(kind)
        soft = hard if megabytes is None else num_bytes + megabytes * 2**20
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def answer(action: Callable[[], Any], number: int = 0) -> bytes:
    """Returns the result or the failure of `action`, for the request `number`, as a line of JSON.

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
    # In a fork that the action has made: only the process itself answers.
    if os.getpid() != pid:
        os._exit(0)
    return line + b"\n"


def ask_kernel(option: int, value: int) -> None:
    """Sets an option of this process, on Linux. A subreaper becomes the parent of its orphans."""
    if LIBC:
        LIBC.prctl(option, value, 0, 0, 0)


def kill(pid: int) -> None:
    """Kills a process and its group."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def end_strays(spared: Iterable[int] = ()) -> None:
    """Ends all children of this process but the spared, where the system lists them.

    A subreaper's children are also the orphans of children that have ended.
    """
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    while file.exists() and (strays := {*map(int, file.read_text().split())}.difference(spared)):
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def serve() -> None:
    """Answers requests until stdin ends."""
    memory_mb = int(sys.argv[1])
    seconds = float(sys.argv[2])
    cpu_seconds = float(sys.argv[3])

    # The protocol has its own descriptors: a task prints to stderr, and its stdin is empty.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "wb")
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
        if "keywords" in task:
            return awaited(functions[0](**{name: attributes_of(value) for name, value in task["keywords"].items()}))
        return awaited(functions[0](argument_of(task)) if isinstance(task, dict) else functions[0](*task))

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
    """Waits for the worker to end, or ends it at SIGTERM. Ends all that it has started, and returns its exit status."""
    # The pool notices the worker's end when these descriptors close: only the worker may hold them.
    for descriptor in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    pid, status = 0, 0
    while pid != worker:
        if signal.sigwait(SIGNALS) == signal.SIGTERM:
            kill(worker)
        # Orphans of the worker are reaped too.
        while (reaped := os.waitpid(-1, os.WNOHANG))[0] not in (0, worker):
            pass
        pid, status = reaped
    # The rest of its group, and what has left the group.
    kill(worker)
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
    # The kernel kills the worker when its parent ends.
    ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    serve()


if __name__ == "__main__":
    main()
