"""Grades programs: a test runs here, the program in a jail, and only plain values come back.

It is loaded by a worker of the sandbox, whose task is a call of `grade`. What a test expects is only in this process.
A name of the program is a function here: it sends its arguments to the jail and returns a value that this process has
read from text. So what a program does to assertions, equality or its exit it does to itself.

What a test does with such values takes time here. A test that takes too much ends this process, which is one of a pool.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
jail: Any = importlib.import_module("jail")
del sys.path[0]

PATIENCE = 60.0  # seconds beside those of a test, in which a busy machine must run it
GRADER_SHARE = 0.75  # of a test's CPU seconds, that the test itself may take here
NOT_RAISED = (StopIteration, StopAsyncIteration, BaseExceptionGroup)
"""Exceptions of a program that are not raised in a test: they would end its loops, and so pass it, or hold others."""
MAX_ANSWER, MAX_DIGITS = 1 << 26, 100_000  # bytes, and digits of a number
NONSENSE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""What reading raises where a program has written in the place of the jail."""


class Ended(BaseException):
    """The program gives no value: status, and why. No `except Exception` of a test takes it for an answer."""


class Program:
    """A program in its jail. With process 1 of its namespaces all that it has started ends."""

    def __init__(self, source: str, limits: dict[str, Any], folder: str) -> None:
        self.channel, other = socket.socketpair()
        self.channel.settimeout(20 * limits["seconds"] + PATIENCE)
        self.answers = self.channel.makefile("rb")
        self.source = source
        self.seconds = limits["seconds"]
        self.is_new_test = True
        self.failure = ""
        """Why the jail failed, which no test may take for a failure of the program."""
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

    @contextmanager
    def test(self) -> Iterator[None]:
        """Begins a test, which has limits of its own."""
        self.is_new_test = True
        # Not a handler: what takes long may be one operation of Python's. The pool sees why this process has ended.
        signal.setitimer(signal.ITIMER_PROF, GRADER_SHARE * self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def begin(self, limits: dict[str, Any]) -> tuple[str, str]:
        """Starts the jail, and builds the program if a command does that."""
        self.failure = "the process that encloses the program ended before it ran"
        reply = self.answer(self.source, limits)
        self.failure = ""
        return reply

    def ask(self, what: str, text: str) -> tuple[str, str]:
        """The jail's answer: a status, and what the program printed or what went wrong."""
        is_new_test = self.is_new_test
        self.is_new_test = False
        return self.answer(what, text, is_new_test)

    def answer(self, *request: Any) -> tuple[str, str]:
        """The answer to a request. Raises Ended where there is none."""
        try:
            self.channel.sendall(json.dumps(request).encode() + b"\n")
            status, text = json.loads(self.answers.readline(MAX_ANSWER))
        except NONSENSE as error:
            raise Ended("crash", "it ended what runs it") from error
        if status == "refused":
            self.failure = f"the program cannot be enclosed: {text}"
            raise Ended("crash", self.failure)
        return str(status), str(text)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What a function of the program returns. Raises Python's own exception that it raises."""
        reply = self.value("call", jail.plain([name, args, kwargs]))
        try:
            if "raised" not in reply:
                return jail.value_of(reply["value"])
            kind, message = getattr(builtins, reply["raised"]), str(reply["text"])
        except NONSENSE as error:
            raise Ended("crash", "no answer") from error
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise Ended("crash", message)
        if issubclass(kind, NOT_RAISED):
            raise Ended("error", f"{kind.__name__}: {message}")
        try:
            raised = kind(message)
        except TypeError:  # it takes more than a message, as UnicodeDecodeError does
            raised = kind.__new__(kind)
            raised.args = (message,)
        raise raised

    def defines(self, names: list[str]) -> list[str]:
        """Those of some names that the program defines."""
        try:
            defined = {str(name) for name in self.value("names", names)}
        except TypeError as error:
            raise Ended("crash", "no answer") from error
        return [name for name in names if name in defined]

    def value(self, what: str, request: Any) -> Any:
        """The jail's answer to a request, as a value of JSON."""
        status, text = self.ask(what, json.dumps(request))
        if status != "ok":
            raise Ended(status, text)
        try:
            return json.loads(text)
        except NONSENSE as error:
            raise Ended("crash", "no answer") from error


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
        exec(test, {name: partial(program.call, name) for name in names_of_program(test, program)})
    except AssertionError:
        return "wrong", test.strip().splitlines()[-1][:300]
    except Ended as error:
        return error.args[0], error.args[1]
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"[:300]
    return "ok", ""


def names_of_program(test: str, program: Program) -> list[str]:
    """The names in a test that are functions of the program. Raises NameError if there are none.

    They are those that neither the test nor Python has: what a program calls `sorted` is not what its test means by it.
    But where a test calls nothing else, its subject has a name of Python's, and the program must define it.
    """
    tree = ast.parse(test)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    free = loaded - names_bound(tree)
    names = free - vars(builtins).keys()
    subjects = subjects_of(tree, free & vars(builtins).keys())
    if names or not subjects:
        return sorted(names)
    defined = program.defines(subjects)
    if not defined:
        raise NameError(f"the program defines no {' or '.join(subjects)}")
    return defined


def names_bound(tree: ast.AST) -> set[str]:
    """The names that a test gives to something itself."""
    bound = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other_name):
                bound.add(other_name or name.partition(".")[0])
    return bound


def subjects_of(tree: ast.AST, names: set[str]) -> list[str]:
    """The functions among some names that a test may be about: it calls them on values in which no other is called.

    Where it calls none so, they are those that it hands to a function.
    """

    def inside(node: ast.AST) -> set[str]:
        return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} & names

    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {
        call.func.id
        for call in calls
        if isinstance(call.func, ast.Name) and not any(map(inside, [*call.args, *(one.value for one in call.keywords)]))
    }
    handed = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
    return sorted(called & names or handed & names)


def run_all(program: Program, tests: list[Any], whole: bool) -> list[tuple[str, str]]:
    """Statuses of tests, run in an order that depends on the program."""
    found = [("not_run", "")] * len(tests)
    for index in random.Random(program.source).sample(range(len(tests)), len(tests)):
        with program.test():
            found[index] = run_one(program, tests[index])
        if found[index][0] == "crash" or (whole and found[index][0] != "ok"):
            break
    return found


def run_pytest(program: Program, text: str, whole: bool) -> list[tuple[str, str]]:
    """Statuses of the tests of a pytest file, which imports the program as `solution`."""
    import pytest

    current = contextlib.ExitStack()  # the test that runs
    found: dict[str, tuple[str, str]] = {}

    def function(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(program.call, name)

    class Plugin:
        def pytest_collection(self) -> None:
            current.enter_context(program.test())

        def pytest_collection_finish(self) -> None:
            current.close()

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            found.update((item.nodeid, ("crash", "not run")) for item in items)
            random.Random(program.source).shuffle(items)

        def pytest_runtest_logstart(self) -> None:
            current.close()
            current.enter_context(program.test())

        def pytest_runtest_logfinish(self) -> None:
            current.close()

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
        with current:
            pytest.main([str(path), *quiet, *(["-x"] if whole else [])], plugins=[Plugin()])
    failed = any(status not in ("ok", "crash") for status, _ in found.values())
    if failed:
        found = {name: ("not_run", "") if pair == ("crash", "not run") else pair for name, pair in found.items()}
    return [*found.values()] or [("error", "pytest found no test that can begin")]


def grade(text: str, tests: Any, limits: dict[str, Any], whole: bool) -> list[tuple[str, str]]:
    """Statuses of an answer's tests, each with what went wrong; none without a program, the answer's last fence.

    Tests are a pytest file, or a list of asserts, as text, and of dicts with `stdin` and `stdout`. With `whole`, all
    must pass: the first that fails is the last.
    """
    source = last_fence(text)
    if source is None:
        return []
    sys.set_int_max_str_digits(MAX_DIGITS)  # of this worker: whoever only imports the file keeps their own
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Program(source, limits, folder)) as program:
        try:
            status, text = program.begin(limits)
            if status != "ok":
                return [(status, text)]
            graded = run_pytest(program, tests, whole) if isinstance(tests, str) else run_all(program, tests, whole)
        except Ended as error:
            graded = [(error.args[0], error.args[1])]
        if program.failure:
            raise RuntimeError(program.failure)
        return graded
