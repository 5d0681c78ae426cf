"""The reward for programs: honest ones pass, hostile ones earn nothing and leave nothing."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.plugins.code.reward import CodeReward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError

SECRET = "secret-5b1f09"

SECTIONS = {
    title: code
    for title, _, code in (
        part.partition("\n") for part in Path(__file__).with_name("hostile.txt").read_text().split("\n=== ")[1:]
    )
}


def hostile(kind: str) -> dict[str, str]:
    """The programs of a kind, with what they share in place of its name."""
    shared = {title.split()[1]: code for title, code in SECTIONS.items() if title.startswith("shared")}
    found = {title.removeprefix(f"{kind} "): code for title, code in SECTIONS.items() if title.startswith(f"{kind} ")}
    return {title: "\n".join(shared.get(line, line) for line in code.splitlines()) for title, code in found.items()}


OUTPUT, MODULES = hostile("output"), hostile("module")
"""Programs that are run on an input, where `SECRET` is expected; and modules whose `answer(3)` is asked for."""

MODULE_TESTS = [
    "assert answer(3) == 918273645",
    "assert abs(answer(3) - 918273645.5) < 1e-6",
    "assert str(answer(3)).startswith('91827')",
]


def sample(program: str, tests: Any) -> Sample:
    question = Question("Q", "", "code.jsonl:3", {"tests": tests})
    return Sample(Prompt(0, "Q", [1], question), f"So:\n```python\n{program}\n```\nDone.", [1], FinishReason.STOP)


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with closing(CodeReward(timeout=1.0, num_workers=1)) as reward:
        reward.setup(None)  # type: ignore[arg-type]
        yield reward


def grade(reward: CodeReward, program: str, tests: Any) -> tuple[float, str, str]:
    result: RewardResult = reward([sample(program, tests)])
    return result.value[0], result.status[0], result.note[0]


def processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def started_since(before: set[int]) -> list[str]:
    """The commands of all processes that this one has started since, but for the worker's and the jail's own."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}

    def mine(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and pid > 1 and mine(parents[pid]))

    return [args for pid, _, args in rows if int(pid) not in before and mine(int(pid)) and not args.startswith("ps ")]


def ours(commands: list[str]) -> list[str]:
    """The commands but for those of what grades."""
    return [args for args in commands if "jail.py" not in args and "sandbox/main.py" not in args]


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A folder that must stay as it is, and a port to which nobody may connect."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "expected.json").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0grpo-canary")
        abstract.listen()
        server.setblocking(False)
        yield folder, server.getsockname()[1]
        with pytest.raises(BlockingIOError):
            server.accept()


def test_there_are_sixty_and_more() -> None:
    assert len(OUTPUT) + len(MODULES) >= 60


def check_harmless(before: set[int], folder: Path) -> None:
    assert ours(started_since(before)) == []
    assert [path.name for path in folder.iterdir()] == ["expected.json"]
    assert not any(Path(f"{place}/new").exists() for place in ("/usr", "/etc", "/root", "/var/tmp", "/dev/shm"))


@pytest.mark.parametrize("name", OUTPUT)
def test_a_hostile_program_earns_nothing_and_leaves_nothing(
    reward: CodeReward, canary: tuple[Path, int], name: str
) -> None:
    folder, port = canary
    before = processes()
    program = f"CANARY, PORT = {str(folder)!r}, {port}\n" + OUTPUT[name]
    value, status, note = grade(reward, program, [{"stdin": "go\n", "stdout": SECRET}])
    assert value == 0 and status != "ok", note
    check_harmless(before, folder)
    # What runs programs goes on.
    assert grade(reward, "print(input()[::-1])", [{"stdin": "abc\n", "stdout": "cba\n"}])[0] == 1


@pytest.mark.parametrize("name", MODULES)
def test_a_hostile_module_earns_nothing(reward: CodeReward, canary: tuple[Path, int], name: str) -> None:
    before = processes()
    for test in MODULE_TESTS:
        value, status, note = grade(reward, MODULES[name], [test])
        assert value == 0 and status != "ok", (test, note)
    file = "from solution import answer\n\ndef test_it():\n    " + MODULE_TESTS[0]
    assert grade(reward, MODULES[name], file)[0] == 0
    check_harmless(before, canary[0])


def test_what_the_hostile_ones_want_is_rewarded(reward: CodeReward) -> None:
    assert grade(reward, f"print({SECRET!r})", [{"stdin": "go\n", "stdout": SECRET}])[:2] == (1.0, "ok")
    for test in MODULE_TESTS[::2]:
        assert grade(reward, "def answer(n): return 918273645", [test])[:2] == (1.0, "ok")


def test_nothing_is_left_after_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = processes()
    with closing(CodeReward(timeout=1.0, num_workers=1)) as own:
        assert grade(own, OUTPUT["process that outlives"], [{"stdin": "", "stdout": "7"}])[0] == 0
        assert started_since(before)
    assert started_since(before) == []
    assert [*tmp_path.iterdir()] == []


HONEST: list[tuple[str, Any]] = [
    ("print(sum(map(int, input().split())))", [{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "1 2 3", "stdout": "6\n"}]),
    ("import sys\nfor line in sys.stdin: print(line.strip()[::-1], '')",
     [{"stdin": "ab\ncd\n", "stdout": "ba\ndc\n\n"}]),
    ("import atexit, io, os\nout = io.StringIO()\natexit.register(lambda: os.write(1, out.getvalue().encode()))\n"
     "print(input(), file=out)", [{"stdin": "é", "stdout": "é"}]),
    ("import threading, sys\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 26)\n"
     "def f(n): return n and 1 + f(n - 1)\nthreading.Thread(target=lambda: print(f(20000))).start()",
     [{"stdin": "", "stdout": "20000"}]),
    ("open('notes', 'w').write(input())\nprint(open('/tmp/notes').read())", [{"stdin": "x", "stdout": "x"}]),
    ("print('x' * 200000)", [{"stdin": "", "stdout": "x" * 200000}]),
    ("if __name__ == '__main__':\n    import json, hashlib, sqlite3\n    print(hashlib.sha256(b'').hexdigest()[:4])",
     [{"stdin": "", "stdout": "e3b0"}]),
    ("import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)",
     [{"stdin": "", "stdout": "hi"}]),
    ("print('loading')\ndef f(n): return n * 2",
     ["assert f(2) == 4", "assert f(-1) == -2", "assert abs(f(0.1) - 0.2) < 1e-9"]),
    ("def f(*given, **more): return (given, more, {'a': {3}}, b'x', 1j, 7 ** 9999, float('inf'), None, set())",
     ["assert f(1, [2.5, True], x={(1, 'y')}) == ((1, [2.5, True]), {'x': {(1, 'y')}}, {'a': {3}}, b'x', 1j, 7 ** 9999,"
      " float('inf'), None, set())"]),
    ("from collections import Counter, namedtuple, OrderedDict\nP = namedtuple('P', 'x y')\n"
     "def f(): return [Counter('aab'), P(1, 2), OrderedDict(a=1)]",
     ["assert f() == [{'a': 2, 'b': 1}, (1, 2), {'a': 1}]"]),
    ("class Negative(ValueError): pass\ndef f(n):\n    raise Negative('negative')",
     ["try:\n    f(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\nelse:\n    assert False"]),
    ("def has_close(xs, t): return any(abs(a - b) < t for i, a in enumerate(xs) for b in xs[:i])",
     ["def check(candidate):\n    assert candidate([1.0, 2.0], 0.5) == False\n    assert candidate([1.0, 1.2], 0.5)\n"
      "check(has_close)"]),
    ("def first(xs): return xs[0]",
     "import pytest\nfrom solution import first\n\n@pytest.fixture\ndef full():\n    return [1, 2]\n\n"
     "@pytest.mark.parametrize('n', [3, 4])\ndef test_first(n, full):\n    assert first([n, *full]) == n\n\n"
     "def test_raises():\n    with pytest.raises(IndexError):\n        first([])\n"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(HONEST)))
def test_an_honest_program_passes(reward: CodeReward, index: int) -> None:
    value, status, note = grade(reward, *HONEST[index])
    assert (value, status) == (1.0, "ok"), note


WRONG: list[tuple[str, Any, str, str]] = [
    ("print(8)", [{"stdin": "3 4", "stdout": "7"}], "wrong", "printed '8\\n' for '3 4'"),
    ("print(7); raise KeyError(3)", [{"stdin": "", "stdout": "7"}], "error", "KeyError: 3"),
    ("print(7); exit(3)", [{"stdin": "", "stdout": "7"}], "error", "exit 3"),
    ("print(7", [{"stdin": "", "stdout": "7"}], "error", "SyntaxError"),
    ("def f(n): return n", ["assert f(2) == 4"], "wrong", "assert f(2) == 4"),
    ("def g(n): return n", ["assert f(2) == 4"], "error", "AttributeError"),
    ("def f(n): return print", ["try:\n    f(2)\nexcept TypeError:\n    pass"], "error", "no plain value"),
    ("1 / 0", ["assert f(2) == 4"], "error", "ZeroDivisionError"),
    ("def f(n):\n    while True: pass", ["assert f(2) == 4"], "timeout", "test 1: timeout"),
    ("def f(n): return [2, 4]",
     "from solution import f\ndef test_f():\n    assert f(2) == [2, 5]\n", "wrong", "test_f"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_the_note_tells_which_test_failed(reward: CodeReward, index: int) -> None:
    program, tests, expected, text = WRONG[index]
    value, status, note = grade(reward, program, tests)
    assert (value, status) == (0.0, expected) and text in note, note


def test_partial_credit_counts_every_test() -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9", "assert f(4) == 4"]
    with closing(CodeReward(partial_credit=True, num_workers=1)) as own:
        value, status, note = grade(own, "def f(n): return n * n", tests)
    assert (value, status) == (0.75, "wrong")
    assert note.splitlines()[:2] == ["test 1: ok", "test 2: ok"] and note.count("ok") == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("```\nprint(1)\n```\nBetter:\n```py\nprint(7)\n```", 1.0),
        ("```py\nprint(7)\n```\nor\n```py\nprint(1)\n```", 0.0),
        ("print(7)", 0.0),
        ("```py\nprint(7)", 0.0),
        ("", 0.0),
        ("```py\nprint(7)\n```\n```py\nprint(1)", 0.0),
        ("  ```py\nprint(7)\n  ```", 1.0),
    ],
)
def test_the_program_is_the_last_fence(reward: CodeReward, text: str, value: float) -> None:
    question = Question("Q", "", metadata={"tests": [{"stdin": "", "stdout": "7"}]})
    result = reward([Sample(Prompt(0, "Q", [1], question), text, [1], FinishReason.STOP)])
    assert result.value == [value]
    assert result.status == (["ok"] if value else result.status) and not reward.tally.failed


def test_any_command_and_a_build() -> None:
    build = ["/bin/sh", "-c", "(echo '#!/bin/sh'; cat main) > program && chmod +x program"]
    tests = [{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "5 6\n", "stdout": "11"}]
    with closing(CodeReward(command=["./program"], build=build, num_workers=1)) as own:
        assert grade(own, "read a b; echo $((a + b))", tests)[:2] == (1.0, "ok")
        assert grade(own, "echo 7", tests)[0] == 0
        assert grade(own, "kill -9 1; kill -9 -1; cat /proc/1/environ", tests)[0] == 0
    with closing(CodeReward(command=["./program"], build=["/bin/sh", "-c", "exit 3"], num_workers=1)) as failing:
        assert grade(failing, "x", tests)[1] == "error"


@pytest.mark.parametrize("tests", [None, [], "assert f(1)", [3], [{"stdin": "1"}], "[{}]"])
def test_questions_without_tests_are_refused(reward: CodeReward, tests: Any) -> None:
    with pytest.raises(UsageError, match=r"code.jsonl:3: tests="):
        reward.read_questions([sample("", tests).prompt.question])


def test_a_machine_without_namespaces_is_refused_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = Path(CodeReward.setup.__code__.co_filename).parent / "inside"
    for file in broken.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text().replace('"unshare")', '"unshare") or check(-1, "unshare")'))
    monkeypatch.setattr(
        "grpo_lightning.plugins.code.reward.inside", lambda name, _: f"{tmp_path}/{name.replace('.', '.py:')}"
    )
    with closing(CodeReward(num_workers=1)) as own, pytest.raises(UsageError, match=r"unshare.*`unsafe: true`"):
        own.setup(None)  # type: ignore[arg-type]
    with closing(CodeReward(num_workers=1, unsafe=True, timeout=1.0)) as own:
        own.setup(None)  # type: ignore[arg-type]
        assert "with all your rights" in caplog.text
        before = processes()
        for program, value in (("print(7)", 1.0), ("print(8)", 0.0), (OUTPUT["process that outlives"], 0.0)):
            assert grade(own, program, [{"stdin": "", "stdout": "7"}])[0] == value
        assert ours(started_since(before)) == []
    assert started_since(before) == []


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_honest_programs_pass_on_a_busy_machine(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
    with closing(CodeReward(timeout=2.0, num_workers=2)) as own:
        try:
            own.setup(None)  # type: ignore[arg-type]
            began = time.monotonic()
            result = own([sample(*HONEST[(0, 4, 8)[index % 3]]) for index in range(count)])
            with capsys.disabled():
                print(f" {count / (time.monotonic() - began):.1f} programs per second beside two that spin", end="")
            assert result.value == [1.0] * count
        finally:
            for one in busy:
                one.kill()
                one.wait()
