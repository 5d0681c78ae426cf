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

PATIENCE = 60.0
"""Seconds beside the limit of a test in which a busy machine must run it."""
GRADER_FRACTION = 0.75
"""The fraction of a test's CPU seconds that the test itself may take in this process."""
NOT_RAISED = (StopIteration, StopAsyncIteration, BaseExceptionGroup)
"""Exceptions of a program that are not raised in a test: they would end its loops, and so pass it, or hold others."""
MAX_ANSWER, MAX_DIGITS = 1 << 26, 100_000
"""Bytes of an answer, and digits of a number."""
NONSENSE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""What reading raises where a program has written in the place of the jail."""


class Ended(BaseException):
    """The program gives no value: a status and the reason. No `except Exception` of a test takes it for an answer."""


class Program:
    """A program in its jail. With process 1 of its namespaces every process of the program ends."""

    def __init__(self, source: str, limits: dict[str, Any], folder: str) -> None:
        self.channel, jail_end = socket.socketpair()
        self.channel.settimeout(20 * limits["seconds"] + PATIENCE)
        self.answers = self.channel.makefile("rb")
        self.source = source
        self.seconds = limits["seconds"]
        self.is_new_test = True
        self.failure = ""
        """Why the jail failed, which no test may take for a failure of the program."""
        command = [sys.executable, "-P", "-s", "-S", "-X", "utf8", jail.__file__]
        variables = {"PYTHONHASHSEED": "0", "PYTHONINTMAXSTRDIGITS": f"{MAX_DIGITS}"}
        with jail_end:
            self.process = subprocess.Popen(
                command, stdin=jail_end.fileno(), stdout=jail_end.fileno(), cwd=folder, env=variables
            )

    def close(self) -> None:
        """Ends the jail, and with it the program."""
        self.process.terminate()
        self.process.wait()
        self.channel.close()

    @contextmanager
    def test(self) -> Iterator[None]:
        """Begins a test, which has limits of its own."""
        self.is_new_test = True
        # Not a handler: what takes long may be one operation of Python's. The pool sees why this process has ended.
        signal.setitimer(signal.ITIMER_PROF, GRADER_FRACTION * self.seconds)
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
        """Returns the jail's answer: a status, and the text that the program printed or what went wrong."""
        is_new_test = self.is_new_test
        self.is_new_test = False
        return self.answer(what, text, is_new_test)

    def answer(self, *request: Any) -> tuple[str, str]:
        """Returns the answer to a request. Raises Ended where there is none."""
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
        """Calls a function of the program; returns its value, or raises the exception of Python's that it raised."""
        reply = self.value("call", jail.plain([name, args, kwargs]))
        try:
            if "raised" not in reply:
                return jail.value_of(reply["value"])
            kind = getattr(builtins, reply["raised"])
            message = str(reply["text"])
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
        """Returns the names of a list that the program defines."""
        try:
            defined = {str(name) for name in self.value("names", names)}
        except TypeError as error:
            raise Ended("crash", "no answer") from error
        return [name for name in names if name in defined]

    def value(self, what: str, request: Any) -> Any:
        """Returns the jail's answer to a request, as a value of JSON."""
        status, text = self.ask(what, json.dumps(request))
        if status != "ok":
            raise Ended(status, text)
        try:
            return json.loads(text)
        except NONSENSE as error:
            raise Ended("crash", "no answer") from error


def last_fence(text: str) -> str | None:
    """Returns the program in the last fence of a text, unless that is open."""
    # Around closed fences the text has an odd number of pieces.
    pieces = re.split(r"^[ \t]*```.*\n?", text, flags=re.MULTILINE)
    return pieces[-2] if len(pieces) > 1 and len(pieces) % 2 else None


def run_one(program: Program, test: Any) -> tuple[str, str]:
    """Returns the status of a test, and what went wrong."""
    try:
        if isinstance(test, dict):
            status, output = program.ask("run", test["stdin"])
            if status != "ok":
                return status, output
            # White space at the ends of lines, and at the end of the output, does not count.
            actual, expected = (
                [line.rstrip() for line in text.rstrip().splitlines()] for text in (output, test["stdout"])
            )
            note = f"printed {output[-200:]!r} for {test['stdin'][:100]!r}"
            return ("ok", "") if actual == expected else ("wrong", note)
        exec(test, {name: partial(program.call, name) for name in names_of_program(test, program)})
    except AssertionError:
        return "wrong", test.strip().splitlines()[-1][:300]
    except Ended as error:
        return error.args[0], error.args[1]
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"[:300]
    return "ok", ""


def names_of_program(test: str, program: Program) -> list[str]:
    """Returns the names in a test that are functions of the program. Raises NameError if there are none.

    Neither the test nor Python has these names: what a program calls `sorted` is not what its test means by it. But
    where a test calls nothing else, its subject has a name of Python's, and the program must define it.
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
    """Returns the names that a test binds itself."""
    bound = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=alias):
                bound.add(alias or name.partition(".")[0])
    return bound


def subjects_of(tree: ast.AST, names: set[str]) -> list[str]:
    """Returns the functions of some names that a test may be about: it calls them on values that call no other.

    Where it calls none so, they are the names that it hands to a function.
    """

    def inside(node: ast.AST) -> set[str]:
        return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} & names

    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {
        call.func.id
        for call in calls
        if isinstance(call.func, ast.Name)
        and not any(map(inside, [*call.args, *(keyword.value for keyword in call.keywords)]))
    }
    handed = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
    return sorted(called & names or handed & names)


def run_all(program: Program, tests: list[Any], all_must_pass: bool) -> list[tuple[str, str]]:
    """Returns the statuses of tests, which run in an order that depends on the program."""
    statuses = [("not_run", "")] * len(tests)
    for index in random.Random(program.source).sample(range(len(tests)), len(tests)):
        with program.test():
            statuses[index] = run_one(program, tests[index])
        if statuses[index][0] == "crash" or (all_must_pass and statuses[index][0] != "ok"):
            break
    return statuses


def run_pytest(program: Program, text: str, all_must_pass: bool) -> list[tuple[str, str]]:
    """Returns the statuses of the tests of a pytest file, which imports the program as `solution`."""
    import pytest

    running_test = contextlib.ExitStack()
    statuses: dict[str, tuple[str, str]] = {}

    # An attribute of `solution` is a function of the program.
    def function(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(program.call, name)

    # Collecting has a limit of time, and each test; a test that never began has status `crash`.
    class Plugin:
        def pytest_collection(self) -> None:
            running_test.enter_context(program.test())

        def pytest_collection_finish(self) -> None:
            running_test.close()

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            statuses.update((item.nodeid, ("crash", "not run")) for item in items)
            random.Random(program.source).shuffle(items)

        def pytest_runtest_logstart(self) -> None:
            running_test.enter_context(program.test())

        def pytest_runtest_logfinish(self) -> None:
            running_test.close()

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed:
                lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
                note = f"{report.nodeid.split('::', 1)[-1]}: {''.join(lines[:1])[:300]}"
                statuses[report.nodeid] = ("ok", "") if report.passed else ("wrong", note)

    solution: Any = ModuleType("solution")
    sys.modules["solution"], solution.__getattr__ = solution, function
    sys.modules.pop("test_program", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(open(os.devnull, "w")):
        path = Path(folder) / "test_program.py"
        path.write_text(text, encoding="utf-8")
        quiet = ["-q", "-s", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull]
        with running_test:
            pytest.main([str(path), *quiet, *(["-x"] if all_must_pass else [])], plugins=[Plugin()])
    # What did not run because another test failed is no crash.
    if any(status not in ("ok", "crash") for status, _ in statuses.values()):
        statuses = {name: ("not_run", "") if pair == ("crash", "not run") else pair for name, pair in statuses.items()}
    return [*statuses.values()] or [("error", "pytest found no test that can begin")]


def grade(text: str, tests: Any, limits: dict[str, Any], all_must_pass: bool) -> list[tuple[str, str]]:
    """Returns the statuses of an answer's tests, each with what went wrong; none without a program.

    The program is in the answer's last fence. Tests are a pytest file, or a list of asserts, as text, and of dicts with
    `stdin` and `stdout`. With `all_must_pass` the first test that fails is the last.
    """
    source = last_fence(text)
    if source is None:
        return []
    sys.set_int_max_str_digits(MAX_DIGITS)  # not on import, which would change it for other processes
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Program(source, limits, folder)) as program:
        try:
            status, text = program.begin(limits)
            if status != "ok":
                return [(status, text)]
            graded = (run_pytest if isinstance(tests, str) else run_all)(program, tests, all_must_pass)
        except Ended as error:
            graded = [(error.args[0], error.args[1])]
        if program.failure:
            raise RuntimeError(program.failure)
        return graded
