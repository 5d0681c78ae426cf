"""The reward for programs: honest ones pass, hostile ones earn nothing and leave nothing."""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.plugins.rewards.code.code_reward import CodeReward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.sandbox.main import module_of
from grpo_lightning.sandbox.pool import inside
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError

SECRET = "secret-5b1f09"
CODE = Path(CodeReward.setup.__code__.co_filename)


def sections(name: str, kind: str) -> dict[str, str]:
    """The parts of a kind of a file, by their titles."""
    parts = Path(__file__).with_name(name).read_text(encoding="utf-8").split(f"\n=== {kind} ")[1:]
    found = (part.partition("\n=== ")[0].partition("\n") for part in parts)
    return {title: code.rstrip("\n") for title, _, code in found}


def hostile(kind: str) -> dict[str, str]:
    """The programs of a kind, with what they share in place of its name."""
    shared = sections("hostile.txt", "shared")
    found = sections("hostile.txt", kind)
    return {title: "\n".join(shared.get(line, line) for line in code.splitlines()) for title, code in found.items()}


def graded(kind: str) -> dict[str, tuple[str, Any]]:
    """The programs of a kind, with their tests."""
    found = {title: code.split("\n--- tests\n") for title, code in sections("graded.txt", kind).items()}
    return {title: (program, eval(tests) if tests[0] == "[" else tests) for title, (program, tests) in found.items()}


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

    def is_descendant(pid: int) -> bool:
        return pid == os.getpid() or (pid > 1 and is_descendant(parents.get(pid, 1)))

    new_rows = [(int(pid), args) for pid, _, args in rows if int(pid) not in before and not args.startswith("ps ")]
    return [args for pid, args in new_rows if is_descendant(pid)]


def ours(commands: list[str]) -> list[str]:
    """The commands but for those of what grades."""
    return [args for args in commands if "jail.py" not in args and "sandbox/main.py" not in args]


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A folder that must stay as it is, and a port to which nobody may connect."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "expected.json").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port = server.getsockname()[1]
        abstract.bind(f"\0grpo-canary-{port}")
        abstract.listen()
        server.setblocking(False)
        yield folder, port
        with pytest.raises(BlockingIOError):
            server.accept()


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
    assert len(OUTPUT) + len(MODULES) >= 60
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


HONEST, WRONG = graded("honest"), graded("wrong")


@pytest.mark.parametrize("title", HONEST)
def test_an_honest_program_passes(reward: CodeReward, title: str) -> None:
    value, status, note = grade(reward, *HONEST[title])
    assert (value, status) == (1.0, "ok"), note


@pytest.mark.parametrize("title", WRONG)
def test_the_note_tells_which_test_failed(reward: CodeReward, title: str) -> None:
    _, expected, text = title.split(": ", 2)
    value, status, note = grade(reward, *WRONG[title])
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


@pytest.mark.parametrize(
    ("answer", "test"),
    [
        ("10 ** 9", "assert 2 ** answer(3) == 8"),
        ("10 ** 12", "assert sum(range(answer(3))) == 3"),
        ("10 ** 9", "from solution import answer\ndef test_it():\n    assert 2 ** answer(3) == 8\n"),
    ],
)
def test_what_a_test_computes_with_a_value_has_a_limit(reward: CodeReward, answer: str, test: str) -> None:
    tests = test if "solution" in test else [test]
    assert grade(reward, f"def answer(n): return {answer}", tests)[:2] == (0.0, "timeout")
    assert grade(reward, "def answer(n): return 918273645", MODULE_TESTS[:1])[0] == 1


def test_a_pytest_file_stops_at_its_first_failure_unless_every_test_counts(reward: CodeReward) -> None:
    file = "from solution import f\n" + "".join(f"def test_{n}():\n    assert f({n}) == 0\n" for n in range(3))
    value, status, note = grade(reward, "def f(n): return 1", file)
    assert (value, status) == (0.0, "wrong") and note.count("not_run") == 2
    with closing(CodeReward(partial_credit=True, num_workers=1)) as own:
        value, status, note = grade(own, "def f(n): return int(n == 1)", file)
    assert value == pytest.approx(2 / 3) and "not_run" not in note


def test_programs_see_no_files_of_people(reward: CodeReward) -> None:
    folder = next(path for path in Path("/usr/lib").iterdir() if path.is_dir() and any(path.iterdir()))
    shows = f"import os\nprint(os.listdir({str(folder)!r}), os.path.exists('/usr/src'), os.statvfs('/').f_flag & 1)"
    seen = graded_with(shows, [{"stdin": "", "stdout": "[] False 1"}], hidden=[str(folder)])
    assert seen == [("ok", "")]
    # A folder outside of what they see, and the root, need not be hidden.
    shows = f"import os\nprint(len(os.listdir({str(folder)!r})) > 0)"
    assert graded_with(shows, [{"stdin": "", "stdout": "True"}], hidden=["/", "/usr", "/var"]) == [("ok", "")]
    for hidden in ("/usr/lib", os.path.dirname(os.__file__)):
        with pytest.raises(RuntimeError, match="a folder of the system: work in another"):
            graded_with(shows, [], hidden=[hidden])
    assert reward.limits["hidden"] == [os.getcwd()]


def graded_with(program: str, tests: list[Any], **limits: Any) -> Any:
    """The statuses of a program's tests, graded in this process."""
    own = CodeReward(timeout=1.0)
    grading: Any = module_of(inside("grading.grade", str(CODE)))[0]
    max_digits = sys.get_int_max_str_digits()
    try:
        return grading.grade(f"```\n{program}\n```", tests, own.limits | limits, True)
    finally:
        sys.set_int_max_str_digits(max_digits)


@pytest.mark.parametrize("limit", ["-n 40", "-v 4000000"])
def test_limits_of_the_machine_are_no_fault_of_a_program(limit: str) -> None:
    """Under `ulimit` a program cannot get what its limits promise: the sandbox has failed."""
    limits = CodeReward(memory_limit_mb=4096).limits
    script = f"import sys; sys.path.insert(0, {str(CODE.parent / 'inside')!r}); import grading\n"
    script += f"print(grading.grade('```\\nprint(7)\\n```', [{{'stdin': '', 'stdout': '7'}}], {limits!r}, True))"
    command = ["sh", "-c", f'ulimit {limit}; exec "$0" -c "$1"', sys.executable, script]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode and "RuntimeError: the program cannot be enclosed: the limit" in ended.stderr


def test_a_pytest_file_needs_pytest(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    question = sample("", "from solution import f\ndef test_f(): assert f(1)").prompt.question
    reward.read_questions([question])
    monkeypatch.setattr("grpo_lightning.plugins.rewards.code.code_reward.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"code.jsonl:3: its tests are a pytest file, and pytest is not installed"):
        reward.read_questions([question])


def test_a_command_must_be_there() -> None:
    refusal = pytest.raises(UsageError, match="there is no no-such-language in /usr/local/bin")
    with closing(CodeReward(command=["no-such-language", "main"], num_workers=1)) as own, refusal:
        own.setup(None)  # type: ignore[arg-type]


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


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Replaces something in the code that encloses programs."""

    def replace(text: str, by: str) -> None:
        for file in (CODE.parent / "inside").glob("*.py"):
            (tmp_path / file.name).write_text(file.read_text().replace(text, by))
        monkeypatch.setattr(
            "grpo_lightning.plugins.rewards.code.code_reward.inside",
            lambda name, _: f"{tmp_path}/{name.replace('.', '.py:')}",
        )

    return replace


@pytest.mark.parametrize(
    ("text", "by", "reason"),
    [
        ("os.memfd_create", "broken", "cannot be enclosed: NameError"),
        ("os.pidfd_open(child)", 'check(-1, "pidfd_open")', "cannot be enclosed: .*pidfd_open"),
        ('tell("refused", ', "sys.exit(", "ended before it ran"),
        ("os.setsid()", "os._exit(3)", "a program that is right fails here: error exit 3"),
    ],
)
def test_a_sandbox_that_fails_is_refused_and_gives_nan(
    broken: Callable[[str, str], None], text: str, by: str, reason: str
) -> None:
    with closing(CodeReward(num_workers=1)) as own:
        broken(text, by)
        if text == 'tell("refused", ':
            own.limits["hidden"] = ["/usr/lib"]
        value, status, _ = grade(own, "print(7)", [{"stdin": "", "stdout": "7"}])
        # In the end a run cannot tell why its own process ends.
        assert (status == "error") and (math.isnan(value) or text == "os.setsid()")
        with pytest.raises(UsageError, match=reason):
            own.setup(None)  # type: ignore[arg-type]


def test_a_machine_without_namespaces_is_refused_unless_that_is_allowed(
    broken: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    broken('"unshare")', '"unshare") or check(-1, "unshare")')
    with closing(CodeReward(num_workers=1)) as own, pytest.raises(UsageError, match=r"unshare.*`unsafe: true`"):
        own.setup(None)  # type: ignore[arg-type]
    with closing(CodeReward(num_workers=1, unsafe=True, timeout=1.0)) as own:
        own.setup(None)  # type: ignore[arg-type]
        assert "with all your rights" in caplog.text
        before = processes()
        programs = ["print(7)", "print(8)", OUTPUT["process that outlives"], OUTPUT["many that compute"]]
        assert [grade(own, program, [{"stdin": "", "stdout": "7"}])[0] for program in programs] == [1, 0, 0, 0]
        assert ours(started_since(before)) == []
    assert started_since(before) == []


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_honest_programs_pass_on_a_busy_machine(count: int) -> None:
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
    with closing(CodeReward(timeout=2.0, num_workers=2)) as own:
        try:
            own.setup(None)  # type: ignore[arg-type]
            three = [HONEST[title] for title in ("sums", "files", "prints when it is loaded")]
            result = own([sample(*three[index % 3]) for index in range(count)])
            assert result.value == [1.0] * count
        finally:
            for process in busy:
                process.kill()
                process.wait()
