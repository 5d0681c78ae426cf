"""Grades programs: a test runs here, the program in a jail, and only plain values come back.

It is loaded by a worker of the sandbox, whose task is a call of `grade`. What a test expects is only in this process.
A name of the program is a function here: it sends its arguments to the jail and returns a value that this process has
read from text. So what a program does to assertions, equality or its exit it does to itself.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
jail: Any = importlib.import_module("jail")
del sys.path[0]

PATIENCE = 15.0  # seconds beside those of a test, in which a busy machine must start it
MAX_ANSWER, MAX_DIGITS = 1 << 26, 100_000  # bytes, and digits of a number
sys.set_int_max_str_digits(MAX_DIGITS)
NONSENSE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""What reading raises where a program has written in the place of the jail."""


class Ended(BaseException):
    """The program gives no value: status, and why. No `except Exception` of a test takes it for an answer."""


class Program:
    """A program in its jail. With process 1 of its namespaces all that it has started ends."""

    def __init__(self, source: str, limits: dict[str, Any], folder: str) -> None:
        self.channel, other = socket.socketpair()
        self.channel.settimeout(4 * limits["seconds"] + PATIENCE)
        self.answers, self.source = self.channel.makefile("rb"), source
        command = [sys.executable, "-P", "-s", "-S", "-X", "utf8", jail.__file__]
        variables = {"PYTHONHASHSEED": "0", "PYTHONINTMAXSTRDIGITS": f"{MAX_DIGITS}"}
        with other:
            self.process = subprocess.Popen(
                command, stdin=other.fileno(), stdout=other.fileno(), cwd=folder, env=variables
            )

    def close(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait()
        self.channel.close()

    def ask(self, *request: Any) -> tuple[str, str]:
        """The jail's answer: a status, and what the program printed or what went wrong."""
        try:
            self.channel.sendall(json.dumps(request).encode() + b"\n")
            status, text = json.loads(self.answers.readline(MAX_ANSWER))
            return str(status), str(text)
        except NONSENSE as error:
            raise Ended("crash", "it ended what runs it") from error

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What a function of the program returns. Raises Python's own exception that it raises."""
        status, text = self.ask("call", json.dumps(jail.plain([name, args, kwargs])))
        if status != "ok":
            raise Ended(status, text)
        try:
            told = json.loads(text)
            if "raised" not in told:
                return jail.value_of(told["value"])
            kind, message = getattr(builtins, told["raised"]), str(told["text"])
        except NONSENSE as error:
            raise Ended("crash", "no answer") from error
        raise kind(message) if isinstance(kind, type) and issubclass(kind, Exception) else Ended("crash", message)


def last_fence(text: str) -> str | None:
    """The program in the last fence of a text, unless that is open."""
    parts = re.split(r"^[ \t]*```.*\n?", text, flags=re.MULTILINE)
    return parts[-2] if len(parts) > 1 and len(parts) % 2 else None


def run_one(program: Program, test: Any) -> tuple[str, str]:
    """Status of a test, and what went wrong."""
    try:
        if isinstance(test, dict):
            status, output = program.ask("run", test["stdin"])
            if status != "ok":
                return status, output
            # White space at the ends of lines, and at that of the whole, does not count.
            actual, expected = (
                [line.rstrip() for line in text.rstrip().splitlines()] for text in (output, test["stdout"])
            )
            why = f"printed {output[-200:]!r} for {test['stdin'][:100]!r}"
            return ("ok", "") if actual == expected else ("wrong", why)
        # Names that neither the test nor Python has are the program's functions.
        names = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)} - vars(builtins).keys()
        exec(test, {name: partial(program.call, name) for name in names})
    except AssertionError:
        return "wrong", test.strip().splitlines()[-1][:300]
    except Ended as error:
        return error.args[0], error.args[1]
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"[:300]
    return "ok", ""


def run_all(program: Program, tests: list[Any], whole: bool) -> list[tuple[str, str]]:
    """Statuses of tests, run in an order that depends on the program."""
    found = [("not_run", "")] * len(tests)
    for index in random.Random(program.source).sample(range(len(tests)), len(tests)):
        found[index] = run_one(program, tests[index])
        if found[index][0] == "crash" or (whole and found[index][0] != "ok"):
            break
    return found


def run_pytest(program: Program, text: str) -> list[tuple[str, str]]:
    """Statuses of the tests of a pytest file, which imports the program as `solution`."""
    import pytest

    found: dict[str, tuple[str, str]] = {}

    def function(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(program.call, name)

    class Plugin:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            found.update((item.nodeid, ("crash", "not run")) for item in items)
            random.Random(program.source).shuffle(items)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed:
                lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
                why = f"{report.nodeid.split('::', 1)[-1]}: {''.join(lines[:1])[:300]}"
                found[report.nodeid] = ("ok", "") if report.passed else ("wrong", why)

    solution: Any = ModuleType("solution")
    sys.modules["solution"], solution.__getattr__ = solution, function
    sys.modules.pop("test_program", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(open(os.devnull, "w")):
        path = Path(folder) / "test_program.py"
        path.write_text(text, encoding="utf-8")
        quiet = ["-q", "-s", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull]
        pytest.main([str(path), *quiet], plugins=[Plugin()])
    return [*found.values()] or [("error", "pytest found no test that can begin")]


def grade(text: str, tests: Any, limits: dict[str, Any], whole: bool) -> list[tuple[str, str]]:
    """Statuses of an answer's tests, each with what went wrong; none without a program, the answer's last fence.

    Tests are a pytest file, or a list of asserts, as text, and of dicts with `stdin` and `stdout`. With `whole`, all
    must pass: the first that fails is the last.
    """
    source = last_fence(text)
    if source is None:
        return []
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(Program(source, limits, folder)) as program:
            status, text = program.ask(source, limits)
            if status == "refused":
                raise RuntimeError(f"the program cannot be enclosed: {text}")
            if status != "ok":
                return [(status, text)]
            return run_pytest(program, tests) if isinstance(tests, str) else run_all(program, tests, whole)
    except Ended as error:
        return [(error.args[0], error.args[1])]
