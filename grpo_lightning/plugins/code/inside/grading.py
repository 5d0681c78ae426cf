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
NONSENSE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""What reading raises where a program has written in the place of the jail."""


class Ended(BaseException):
    """The program has ended, hangs or writes nonsense. No `except Exception` of a test takes it for an answer."""


class Session:
    """The program as a module in a process of its own, for one test."""

    current: "Session | None" = None

    def __init__(self, channel: socket.socket, seconds: float) -> None:
        self.channel, self.deadline, self.unread = channel, monotonic() + seconds, b""

    def ask(self, of: int | str, name: str, *given: Any) -> Any:
        """The value of an attribute, or of a call of it with some arguments."""
        call = dict(zip(("args", "kwargs"), (jail.encode(one, number) for one in given), strict=False))
        try:
            self.channel.sendall(json.dumps({"of": of, "name": name} | call).encode() + b"\n")
            reply = json.loads(self._line())
            if "ended" in reply:
                raise Ended(f"the program ended: {reply['ended']}")
            raised, text = [str(kind) for kind in reply.get("raised", [])], reply.get("text")
            value = None if raised else jail.decode(reply["value"], lambda key: Remote(int(key), self))
        except NONSENSE as error:
            raise Ended(f"no answer: {error}") from error
        if raised:
            known = (getattr(builtins, kind, None) for kind in raised)
            kinds = (kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception))
            raise next(kinds, Exception)(f"{raised[0]}: {text}")
        return value

    def _line(self) -> bytes:
        """The next line that the program's process writes."""
        while b"\n" not in self.unread:
            self.channel.settimeout(max(0.001, self.deadline - monotonic()))
            chunk = self.channel.recv(1 << 16)
            self.unread += chunk
            if not chunk or len(self.unread) > MAX_ANSWER:
                raise Ended("too long an answer" if chunk else "the program ended")
        line, self.unread = self.unread.split(b"\n", 1)
        return line


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


class Program:
    """A program in its jail."""

    def __init__(self, channel: socket.socket, source: str, limits: dict[str, Any]) -> None:
        self.channel, self.source, self.limits = channel, source, limits
        self.ended = dict[str, Any]()
        answer = self._answer()
        self.refused, self.error = answer.get("refused"), answer.get("error")
        if limits["build"] and not (self.refused or self.error):
            status, output = self.run("build", "")
            self.error = "" if status == "ok" else f"{status}: {output}"

    def run(self, what: str, stdin: str) -> tuple[str, str]:
        """Status and output of the program on some input; or the status, and what went wrong."""
        most = self.limits["file_mb"] << 20
        with descriptors(stdin.encode(), b"", b"") as files:
            self._start(what, files)
            ended = self._answer()
            out, err = (os.pread(one, most, 0).decode("utf-8", "replace") for one in files[1:])
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
            with other, open(os.devnull, "r+b") as null:
                self._start("calls", [null.fileno()] * 3 + [other.fileno()])
            Session.current = Session(own, self.limits["wall"] + PATIENCE)
            try:
                yield
            finally:
                Session.current = None
                own.close()
                self.ended = self._answer()

    def _start(self, what: str, files: list[int]) -> None:
        socket.send_fds(self.channel, [what.encode()], files)

    def _answer(self) -> dict[str, Any]:
        """The answer of the jail, which a program may have overwhelmed, but which knows nothing that is secret."""
        self.channel.settimeout(self.limits["wall"] + PATIENCE)
        try:
            return dict(json.loads(self.channel.recv(1 << 16)))
        except NONSENSE as error:
            raise Ended("crash") from error


@contextlib.contextmanager
def descriptors(*contents: bytes) -> Iterator[list[int]]:
    """Files in memory, at their beginnings."""
    files = [os.memfd_create("file") for _ in contents]
    try:
        for one, content in zip(files, contents, strict=True):
            with open(one, "wb", closefd=False) as file:
                file.write(content)
            os.lseek(one, 0, os.SEEK_SET)
        yield files
    finally:
        for one in files:
            os.close(one)


@contextlib.contextmanager
def enclosed(source: str, limits: dict[str, Any]) -> Iterator[Program]:
    """A program that can be tested. With process 1 of its namespaces all that it has started ends."""
    own, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-s", "-S", "-X", "utf8", jail.__file__, str(other.fileno()), json.dumps(limits)]
    clean = {"PYTHONHASHSEED": "0"}
    with own, tempfile.TemporaryDirectory() as folder:
        with other, descriptors(source.encode("utf-8", "replace")) as (file,):
            process = subprocess.Popen(command, stdin=file, pass_fds=[other.fileno()], cwd=folder, env=clean)
        try:
            yield Program(own, source, limits)
        finally:
            process.terminate()
            process.wait()


def refusal(limits: dict[str, Any]) -> str:
    """Why programs cannot be enclosed on this machine; empty if they can."""
    with enclosed("", limits | {"build": None}) as program:
        return str(program.refused)


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


def lines_of(output: str) -> list[str]:
    """What is compared of an output: its lines, without white space at their ends and at that of the whole."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def run_one(program: Program, test: Any) -> tuple[str, str]:
    """Status of a test, and what went wrong."""
    if isinstance(test, dict):
        status, out = program.run("run", test["stdin"])
        if status == "ok" and lines_of(out) != lines_of(test["stdout"]):
            return "wrong", f"printed {out[-200:]!r} for {test['stdin'][:100]!r}"
        return status, "" if status == "ok" else out
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


def run_all(program: Program, tests: list[Any], whole: bool) -> list[tuple[str, str]]:
    """Statuses of tests, run in an order that depends on the program."""
    found = [("not_run", "")] * len(tests)
    for index in random.Random(program.source).sample(range(len(tests)), len(tests)):
        with contextlib.suppress(Ended):
            found[index] = "crash", "it ended what runs it"
            found[index] = run_one(program, tests[index])
        if found[index][0] == "crash" or (whole and found[index][0] != "ok"):
            break
    return found


def run_pytest(program: Program, text: str) -> list[tuple[str, str]]:
    """Statuses of the tests of a pytest file, which imports the program as `solution`."""
    import pytest

    found: dict[str, tuple[str, str]] = {}
    solution: Any = ModuleType("solution")
    solution.__getattr__ = named

    class Plugin:
        @pytest.hookimpl(wrapper=True)
        def pytest_collection(self) -> Any:
            with program.session():
                return (yield)

        pytest_runtest_protocol = pytest_collection

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            found.update((item.nodeid, ("crash", "not run")) for item in items)
            random.Random(program.source).shuffle(items)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed:
                lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
                why = f"{report.nodeid.split('::', 1)[-1]}: {''.join(lines[:1])[:300]}"
                found[report.nodeid] = ("ok", "") if report.passed else ("wrong", why)

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
    try:
        with enclosed(source, limits) as program:
            if program.refused:
                raise RuntimeError(f"the program cannot be enclosed: {program.refused}")
            if program.error:
                return [("error", program.error)]
            return run_pytest(program, tests) if isinstance(tests, str) else run_all(program, tests, whole)
    except Ended:
        return [("crash", "it ended what runs it")]
