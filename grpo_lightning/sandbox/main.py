"""A worker process: JSON lines in, JSON lines out. It is a script, so that it imports only what it is told to.

`python main.py MEMORY_MB SECONDS CPU_SECONDS` answers two requests, each by a line `{"status", "value" or "error"}`:

- `{"load": FUNCTION, "path": SYS_PATH}` imports the function: `package.module.function`, `package.module:function` or
  `path/to/file.py:function`.
- `{"task": TASK}` calls it with the items of a list, or with one object that has the keys of a dict as attributes. The
  result of an `async def` is awaited.

If FUNCTION is `async SECONDS FUNCTION`, it must be an `async def`, and TASK is a list of such objects. The calls are
awaited together, each for at most SECONDS. The value is a list with one reply, as above, per object.

The process ends with its parent: when stdin ends, or at the alarm that is set during each task.
"""

import importlib
import importlib.util
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ORPHAN_GRACE = 1.0
"""Seconds after the parent's deadline at which the kernel ends a task whose parent is gone."""


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
        assert spec is not None
        assert spec.loader is not None
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

    import asyncio  # at the top it would double what a copy of the process costs, see inside/instance.py

    async def one(task: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds) as limit:
                return {"status": "ok", "value": await function(SimpleNamespace(**task))}
        except TimeoutError as error:
            return {"status": "timeout"} if limit.expired() else failure(error)
        except MemoryError:
            raise
        except Exception as error:
            return failure(error)

    async def every(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(one, tasks))

    return lambda *tasks: event_loop().run_until_complete(every(list(tasks)))


def awaited(value: Any) -> Any:
    """The value; that of an `async def` is awaited."""

    async def run() -> Any:
        return await value

    return event_loop().run_until_complete(run()) if inspect.isawaitable(value) else value


@cache
def event_loop() -> Any:
    """The event loop of all tasks, so that a user's module can keep a client open between them."""
    import asyncio

    return asyncio.new_event_loop()


def failure(error: BaseException) -> dict[str, Any]:
    """The reply for an exception."""
    return {"status": "error", "error": f"{type(error).__name__}: {error}"[:2000]}


def memory_limits(megabytes: int | None) -> tuple[int, int]:
    """Limits that allow this much address space in addition to what is mapped now; None allows all."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if megabytes is not None and sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft = mapped + megabytes * 2**20
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    return soft, hard


def answer(action: Callable[[], Any]) -> str:
    """The result or the failure of `action`, as one JSON line."""
    try:
        reply = {"status": "ok", "value": action()}
        # A NumPy or PyTorch scalar is a number too.
        return json.dumps(reply, default=float)
    except MemoryError:
        return '{"status": "memory", "error": "out of memory"}'
    except BaseException as error:  # the task's sys.exit() ends the task, not the worker
        return json.dumps(failure(error))


def main() -> None:
    """Answers requests until stdin ends."""
    memory_mb, seconds, cpu_seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    # The protocol has its own descriptors: a task prints to stderr, and its stdin is empty.
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    functions: list[Callable[..., Any]] = []

    def handle(request: dict[str, Any]) -> Any:
        if "load" in request:
            resource.setrlimit(resource.RLIMIT_AS, memory_limits(None))
            sys.path[:] = [*request["path"], os.getcwd()]
            functions[:] = [load(request["load"])]
            resource.setrlimit(resource.RLIMIT_AS, memory_limits(memory_mb))
            return None
        task = request["task"]
        return awaited(functions[0](SimpleNamespace(**task)) if isinstance(task, dict) else functions[0](*task))

    for line in requests:
        request = json.loads(line)
        if "task" in request:
            signal.setitimer(signal.ITIMER_REAL, seconds + ORPHAN_GRACE)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # 0 sets no limit
        reply = answer(lambda request=request: handle(request))  # type: ignore[misc]
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main()
