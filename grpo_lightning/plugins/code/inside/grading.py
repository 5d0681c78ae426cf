"""Grades programs: a test runs here, the program in a jail, and only plain data comes back.

It is loaded by a worker of the sandbox, whose task is a call of `grade`. What a test expects is only in this process: a
program cannot see it, and what the program does to assertions, equality or its exit it does to itself.
"""

import builtins
import contextlib
import importlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
jail: Any = importlib.import_module("jail")
del sys.path[0]

PATIENCE = 15.0  # seconds beside those of a test, in which a busy machine must start it
MAX_ANSWER = 1 << 20  # bytes that a call may return
OPERATORS = ("len", "getitem", "iter", "next", "str", "repr")
CALLABLE = ("endswith", "startswith", "isdisjoint", "issubset", "issuperset")
"""Methods of plain data that are told what a test expects: a program's object may not have them."""


class Ended(BaseException):
    """The program has ended, hangs or writes nonsense. No `except Exception` of a test takes it for an answer."""


class Session:
    """The program as a module in a process of its own, for one test."""

    current: "Session | None" = None

    def __init__(self, channel: socket.socket, seconds: float) -> None:
        self.channel, self.deadline, self.unread = channel, monotonic() + seconds, b""

    def ask(self, of: int | str, name: str, args: Any = None, kwargs: Any = None) -> Any:
        """The value of an attribute, or of a call of it."""
        given = {} if args is None else {"args": jail.encode(args, number), "kwargs": jail.encode(kwargs, number)}
        try:
            self.channel.sendall(json.dumps({"of": of, "name": name} | given).encode() + b"\n")
            while b"\n" not in self.unread:
                self.channel.settimeout(max(0.001, self.deadline - monotonic()))
                chunk = self.channel.recv(1 << 16)
                self.unread += chunk
                if not chunk or len(self.unread) > MAX_ANSWER:
                    raise Ended("too long an answer" if chunk else "the program ended")
            line, self.unread = self.unread.split(b"\n", 1)
            reply = json.loads(line)
            if "ended" in reply:
                raise Ended(f"the program ended: {reply['ended']}")
            raised = [str(kind) for kind in reply.get("raised", [])]
            value = None if raised else jail.decode(reply["value"], lambda key: Remote(int(key), self))
        except OSError as error:
            raise Ended(f"no answer: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError) as error:
            raise Ended(f"no answer: {error}") from error
        if raised:
            known = (getattr(builtins, kind, None) for kind in raised)
            kinds = (kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception))
            raise next(kinds, Exception)(f"{raised[0]}: {reply.get('text')}")
        return value


class Remote:
    """An object of the program. It is equal to nothing but itself, and has no arithmetic: that is for plain data."""

    def __init__(self, key: int | str, session: Session | None = None) -> None:
        self._key, self._session = key, session

    def _ask(self, name: str, *given: Any) -> Any:
        session = self._session or Session.current
        if session is not Session.current or session is None:
            raise Ended("an object of another test")
        return session.ask(self._key, name, *given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the program returns."""
        return self._ask("", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in CALLABLE:
            raise AttributeError(name)
        return self._ask(name)


def operator(name: str) -> Any:
    """A method of `Remote` that the program answers."""
    return lambda self, *args: self._ask(name, args, {})


for name in OPERATORS:
    setattr(Remote, f"__{name}__", operator(f"__{name}__"))


def number(value: Any) -> Any:
    """The key of an object of the program, which alone may be given to it beside plain data."""
    if isinstance(value, Remote):
        return value._key
    raise TypeError(f"a {type(value).__name__} cannot be given to the program: only plain data can")


class Names(dict[str, Any]):
    """The names of a test: those that neither it nor Python has are the program's."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return named(name)


def named(name: str) -> Any:
    """A name of the program: plain data, or an object that is asked for by its name in every test."""
    assert Session.current
    value = Session.current.ask(name, "")
    return Remote(name) if isinstance(value, Remote) else value


class Mother:
    """The process whose copies run programs."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.limits, self.folder = limits, tempfile.mkdtemp()
        self.control, other = socket.socketpair()
        command = [sys.executable, "-P", "-s", "-S", "-X", "utf8", jail.__file__]
        clean = {"PYTHONHASHSEED": "0"}
        given = [str(other.fileno()), self.folder, json.dumps(limits)]
        with other:
            self.process = subprocess.Popen(
                [*command, *given], stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], env=clean
            )
        self.control.settimeout(60.0)
        self.refused = self.ask()["error"]

    def ask(self, *message: Any) -> dict[str, Any]:
        """Sends a message, if there is one, and returns the next."""
        if message:
            jail.send(self.control, *message)
        answer = jail.receive(self.control)
        if answer is None:
            raise RuntimeError("the process that starts programs has ended")
        return dict(answer[0])

    @contextlib.contextmanager
    def program(self, source: str) -> Iterator["Program"]:
        """A program that can be tested."""
        own, other = socket.socketpair()
        with own:
            with other:
                self.ask({}, [other.fileno()])
            try:
                yield Program(own, source, self.limits)
            finally:
                self.ask({})


class Program:
    """A program in its jail."""

    def __init__(self, channel: socket.socket, source: str, limits: dict[str, Any]) -> None:
        self.channel, self.limits, self.wall = channel, limits, 4 * limits["seconds"]
        self.replies = channel.makefile("rb")
        self.error, self.ended = "", dict[str, Any]()
        file = {key: limits[key] for key in ("file", "command")}
        jail.send(channel, file | {"source": source})
        self.error = self.reply().get("error", "")
        if limits["build"] and not self.error:
            status, told = self.run(limits["build"], "")
            self.error = "" if status == "ok" else f"{status}: {told}"

    def reply(self) -> dict[str, Any]:
        """The next reply of process 1, which a program may have overwhelmed, but which knows nothing that is secret."""
        self.channel.settimeout(self.wall + PATIENCE)
        try:
            return dict(json.loads(self.replies.readline(1 << 16)))
        except (OSError, ValueError, TypeError) as error:
            raise Ended("crash") from error

    def run(self, command: list[str] | None, stdin: str) -> tuple[str, str]:
        """Status and output of the program on some input; or the status, and what went wrong."""
        files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
        try:
            os.write(files[0], stdin.encode())
            os.lseek(files[0], 0, os.SEEK_SET)
            jail.send(self.channel, {"command": command, "wall": self.wall}, files)
            ended, most = self.reply(), self.limits["file_mb"] << 20
            out, err = (os.pread(one, most, 0).decode("utf-8", "replace") for one in files[1:])
        finally:
            for one in files:
                os.close(one)
        if ended.get("late"):
            return "timeout", ""
        if len(out) >= most:
            return "too_long", ""
        if ended.get("exit") != 0:
            return "error", (err.strip().splitlines() or [f"exit {ended.get('exit')}"])[-1][:300]
        return "ok", out

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The program as a module, for one test."""
        own, other = socket.socketpair()
        with own:
            with other:
                jail.send(self.channel, {"calls": True, "wall": self.wall}, [other.fileno()])
            Session.current = Session(own, self.wall + PATIENCE)
            try:
                yield
            finally:
                Session.current = None
                own.close()
                self.ended = self.reply()


MOTHERS: dict[str, Mother] = {}


def mother(limits: dict[str, Any]) -> Mother:
    """The one process that starts programs with these limits."""
    key = json.dumps(limits)
    if key not in MOTHERS or MOTHERS[key].process.poll() is not None:
        MOTHERS[key] = Mother(limits)
    return MOTHERS[key]


def refusal(limits: dict[str, Any]) -> str:
    """Why programs cannot be enclosed on this machine; empty if they can."""
    return mother(limits).refused


def last_fence(text: str) -> str | None:
    """The program in the last fence of a text, unless that is open."""
    found: list[str] | None = None
    is_open = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("```"):
            is_open = not is_open
            found = [] if is_open else found
        elif is_open and found is not None:
            found.append(line)
    return None if is_open or found is None else "".join(found)


def same_output(actual: str, expected: str) -> bool:
    """True if two outputs are equal but for white space at the ends of lines and of the whole."""
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (actual, expected))
    return first == second


def run_block(program: Program, test: str) -> tuple[str, str]:
    """Status of a test of asserts, and what went wrong."""
    try:
        with program.session():
            exec(compile(test, "test", "exec"), Names())
    except AssertionError:
        return "wrong", test.strip().splitlines()[-1][:300]
    except Ended as error:
        return ("timeout", "") if program.ended.get("late") else ("crash", str(error)[:300])
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"[:300]
    return "ok", ""


def run_one(program: Program, test: Any) -> tuple[str, str]:
    """Status of a test, and what went wrong."""
    if isinstance(test, str):
        return run_block(program, test)
    status, out = program.run(program.limits["command"], test["stdin"])
    if status == "ok" and not same_output(out, test["stdout"]):
        return "wrong", f"printed {out[-200:]!r} for {test['stdin'][:100]!r}"
    return status, out if status != "ok" else ""


def run_pytest(program: Program, text: str, seed: str) -> list[tuple[str, str]]:
    """Statuses of the tests of a pytest file, by pytest."""
    import pytest

    found: dict[str, tuple[str, str]] = {}
    solution: Any = ModuleType("solution")
    solution.__getattr__ = named

    class Plugin:
        @pytest.hookimpl(wrapper=True)
        def pytest_collection(self) -> Any:
            with program.session():
                return (yield)

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            found.update((item.nodeid, ("crash", "not run")) for item in items)
            random.Random(seed).shuffle(items)

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any) -> Any:
            with program.session():
                return (yield)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed:
                lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
                status = "ok" if report.passed else "wrong"
                found[report.nodeid] = (
                    status,
                    "" if report.passed else f"{item_name(report)}: {''.join(lines[:1])[:300]}",
                )

    def item_name(report: Any) -> str:
        return str(report.nodeid).split("::", 1)[-1]

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(open(os.devnull, "w")):
        path = Path(folder) / "test_program.py"
        path.write_text(text, encoding="utf-8")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.modules["solution"] = solution
        quiet = ["-q", "-s", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull]
        try:
            pytest.main([str(path), *quiet], plugins=[Plugin()])
        finally:
            for name in ("solution", "test_program"):
                sys.modules.pop(name, None)
    return [*found.values()] or [("error", "pytest found no test that can begin")]


def grade(text: str, tests: Any, limits: dict[str, Any], whole: bool) -> list[tuple[str, str]]:
    """Statuses of an answer's tests, each with what went wrong; none without a program.

    Args:
        text: The answer; the program is its last fence.
        tests: A pytest file; or a list of asserts, as text, and of dicts with `stdin` and `stdout`.
        limits: What a program may use.
        whole: Ends with the first test that fails, since all must pass.
    """
    source = last_fence(text)
    if source is None:
        return []
    with mother(limits).program(source) as program:
        if program.error:
            return [("error", program.error)]
        if isinstance(tests, str):
            return run_pytest(program, tests, source)
        found = [("not_run", "")] * len(tests)
        order = [*range(len(tests))]
        random.Random(source).shuffle(order)
        for index in order:
            try:
                found[index] = run_one(program, tests[index])
            except Ended:
                found[index] = "crash", "it ended what runs it"
            if found[index][0] == "crash" or (whole and found[index][0] != "ok"):
                break
        return found
