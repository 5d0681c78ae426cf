"""A worker process: JSON lines in, JSON lines out. A script, so that it imports only what it is told to.

`python worker.py MEMORY_MB SECONDS CPU_SECONDS` answers two requests, each by a line `{"status", "value" or "error"}`:

- `{"load": FUNCTION, "path": SYS_PATH}` imports it: `package.module.function`, `package.module:function` or
  `path/to/file.py:function`.
- `{"task": TASK}` calls it: with the items of a list, or with one object that has the keys of a dict. What an
  `async def` returns is awaited.

`async SECONDS FUNCTION` instead of a FUNCTION is an `async def` whose TASK is a list of such objects. All are awaited
at once, each for so many seconds; the value is a list of what a line would be for each.

It ends with its parent: because stdin ends, or at the alarm that is set during each task.
"""

import asyncio
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
from types import SimpleNamespace
from typing import Any

ORPHAN_GRACE = 1.0
"""Seconds after the parent's own deadline at which the kernel ends a task that nobody waits for any more."""


def load(name: str) -> Callable[..., Any]:
    """The function of that name."""
    if name.startswith("async "):
        _, seconds, name = name.split(" ", 2)
        return together(load(name), float(seconds), name)
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        module_name, _, attribute = name.rpartition(".")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function


def together(function: Callable[..., Any], seconds: float, name: str) -> Callable[..., Any]:
    """Calls an `async def` for several tasks at once."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{name} is no `async def`: only of one can several calls be under way at once")

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
    """What an `async def` comes to."""

    async def run() -> Any:
        return await value

    return event_loop().run_until_complete(run()) if inspect.isawaitable(value) else value


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One for all tasks: a client that a user's module keeps open belongs to it."""
    return asyncio.new_event_loop()


def failure(error: BaseException) -> dict[str, Any]:
    """How an exception is told."""
    return {"status": "error", "error": f"{type(error).__name__}: {error}"[:2000]}


def limit_memory(megabytes: int | None) -> None:
    """Allows that much more address space than is mapped now; None lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if megabytes is not None and sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft = mapped + megabytes * 2**20
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def answer(action: Callable[[], Any]) -> str:
    """What `action` returns or how it failed, as one JSON line."""
    try:
        reply = {"status": "ok", "value": action()}
        # A NumPy or PyTorch scalar is a number too.
        return json.dumps(reply, default=float)
    except MemoryError:
        return '{"status": "memory", "error": "out of memory"}'
    except BaseException as error:  # the task's sys.exit() ends the task, not the worker
        return json.dumps(failure(error))


def main() -> None:
    """Serves until stdin ends."""
    memory_mb, seconds, cpu_seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    # The protocol gets descriptors of its own: what a task prints goes to stderr, what it reads is empty.
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    functions: list[Callable[..., Any]] = []

    def handle(request: dict[str, Any]) -> Any:
        if "load" in request:
            limit_memory(None)
            sys.path[:] = [*request["path"], os.getcwd()]
            functions[:] = [load(request["load"])]
            limit_memory(memory_mb)
            return None
        task = request["task"]
        return awaited(functions[0](SimpleNamespace(**task)) if isinstance(task, dict) else functions[0](*task))

    for line in requests:
        request = json.loads(line)
        if "task" in request:
            signal.setitimer(signal.ITIMER_REAL, seconds + ORPHAN_GRACE)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # 0 is none
        reply = answer(lambda request=request: handle(request))  # type: ignore[misc]
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main()
