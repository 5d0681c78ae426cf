"""A reward for programs, decided by tests."""

import logging
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from grpo_lightning import ranks
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward, Run
from grpo_lightning.sandbox.pool import Outcome, WorkerPool, inside
from grpo_lightning.types import Question, Sample, Status, UsageError, at_least

log = logging.getLogger(__name__)

TRIALS: tuple[tuple[str, list[Any]], ...] = (
    ("print(input()[::-1])", [{"stdin": "abc\n", "stdout": "cba\n"}]),
    ("def double(n): return 2 * n", ["assert double(3) == 6"]),
)
"""Programs with their tests, which must pass before the first completion is sampled."""


class CodeReward(Reward):
    """1 if the program in the last fence of a completion passes all tests of its question, else 0.

    The column `tests` of the data holds a list of asserts, as text, and of dicts with `stdin` and `stdout`; or the text
    of a pytest file, which imports from `solution`.

    A program runs in namespaces of its own, with limits, without a network, and sees no file but the system's. Asserts
    run outside: they call its functions, and get plain values. A machine that cannot enclose a program is refused.

    In an assert, a name that Python has means Python's function, even if the program defines it. But an assert that
    calls nothing else, such as `assert sorted([2, 1]) == [1, 2]`, is about the program's function of this name.

    Args:
        partial_credit: The value is the fraction of tests passed.
        timeout: CPU seconds per call of the program or run on an input, all of its processes together. A program that
            only waits is ended after as long, and a test after twice as long in all of its calls. The test's own
            computation may take three quarters of it. No time passes while the machine is busy with other work.
        memory_limit_mb: Memory of a program in MiB, all of its processes and files together, in addition to what
            Python needs. Its files, which are in memory too, may have an eighth of it.
        command: The command that runs a program, the file `main`: `[node, main]`. Tests need `stdin` then.
        build: The command that compiles it, once per completion: `[gcc, -x, c, main]`.
        unsafe: Run programs without namespaces where these are missing, as your user: they can do all that you can.
        num_workers: Number of programs that run at the same time.
    """

    scores_early = True
    grades_cheaply = False

    def __init__(
        self,
        partial_credit: bool = False,
        timeout: float = 5.0,
        memory_limit_mb: int = 512,
        command: list[str] | None = None,
        build: list[str] | None = None,
        unsafe: bool = False,
        num_workers: int = 2,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        at_least("timeout", timeout, 1, type(self).__name__)
        at_least("memory_limit_mb", memory_limit_mb, 64, type(self).__name__)
        self.partial_credit, self.unsafe = partial_credit, unsafe
        room = {"seconds": timeout, "memory_mb": memory_limit_mb, "file_bytes": memory_limit_mb << 14}
        self.limits: dict[str, Any] = {**room, "run": command, "build": build, "unsafe": False, "hidden": [os.getcwd()]}
        self._pool = WorkerPool(num_workers, timeout=60 * timeout + 60, memory_limit_mb=4 * memory_limit_mb)

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Refuses questions without tests, and pytest files where pytest is missing."""
        for question in questions:
            if isinstance(self._tests(question), str) and find_spec("pytest") is None:
                raise UsageError(
                    f"{question.source or 'a question'}: its tests are a pytest file, and pytest is not installed "
                    "here: pip install pytest, or give a list of asserts"
                )

    def setup(self, run: Run) -> None:
        """Tries programs as `score` runs them. Refuses a machine that cannot enclose them, unless `unsafe` is set."""
        reason = self._trial()
        if not reason:
            return
        if not self.unsafe:
            raise UsageError(
                f"{reason}. It takes user namespaces of Linux 5.14 or newer on x86-64, which a container may forbid, "
                f"and memory_limit_mb={self.limits['memory_mb']} within `ulimit -v`. "
                "`unsafe: true` runs what the policy writes with all your rights"
            )
        self.limits["unsafe"] = True
        if ranks.rank() == 0:
            log.warning("%s; unsafe=true: programs run with all your rights", reason)
        if reason := self._trial():
            raise UsageError(f"{reason}, with `unsafe: true` too")

    def _trial(self) -> str:
        """Returns the reason why this machine cannot run a program; empty if it can."""
        # In the language of a `command` there is no program to try: only the command must be there.
        trials = [("", [])] if self.limits["run"] else TRIALS
        limits = self.limits | {"build": None}
        tasks = [[f"```\n{program}\n```", tests, limits, True] for program, tests in trials]
        for outcome in self._pool.map(inside("grading.grade", __file__), tasks):
            if outcome.status != Status.OK:
                return f"{self.name}: {outcome.error or outcome.status}"
            for status, reason in outcome.value:
                if status != Status.OK:
                    return f"{self.name}: a program that is right fails here: {status} {reason}".strip()
        return ""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Runs the tests of each completion's program.

        The status is `ok`, or the status of the first test that failed: `wrong`, `error`, `timeout`, `too_long` or
        `crash`. Without a fenced program it is `no_answer`. A sandbox that fails gives NaN and `error`.
        """
        all_must_pass = not self.partial_credit
        tasks = [[sample.turn, self._tests(sample.prompt.question), self.limits, all_must_pass] for sample in samples]
        outcomes = self._pool.map(inside("grading.grade", __file__), tasks)
        notes: list[str] = []
        result = RewardResult([], [], note=notes)
        for sample, outcome in zip(samples, outcomes, strict=True):
            value, status, note = self._verdict(outcome)
            result.value.append(value)
            result.status.append(status)
            notes.append(note)
            if math.isnan(value):
                self.tally.explain(sample, status, note)
        return result

    def close(self) -> None:
        self._pool.close()

    def _verdict(self, outcome: Outcome) -> tuple[float, str, str]:
        """Returns the value, status and note of a program: 0 if it took too much, NaN where the sandbox failed."""
        if outcome.status != Status.OK:
            took = outcome.status in (Status.TIMEOUT, Status.MEMORY)
            return 0.0 if took else math.nan, outcome.status, outcome.error
        if not outcome.value:
            return 0.0, Status.NO_ANSWER, ""
        statuses = [status for status, _ in outcome.value]
        passed = statuses.count(Status.OK)
        failed = next((status for status in statuses if status not in (Status.OK, "not_run")), Status.OK)
        value = passed / len(statuses) if self.partial_credit else float(passed == len(statuses))
        lines = [f"test {index}: {status} {note}".strip() for index, (status, note) in enumerate(outcome.value, 1)]
        return value, failed, "\n".join(lines)

    def _tests(self, question: Question) -> Any:
        """Returns the tests of a question. Raises UsageError where they are none that this reward can run."""
        tests = question.metadata.get("tests")
        is_python = self.limits["run"] is None
        is_file = is_python and isinstance(tests, str) and "def test" in tests
        is_list = isinstance(tests, list) and all(
            (isinstance(test, dict) and {"stdin", "stdout"} <= test.keys()) or (is_python and isinstance(test, str))
            for test in tests
        )
        if not tests or not (is_list or is_file):
            raise UsageError(
                f"{question.source or 'a question'}: tests={str(tests)[:80]}: {self.name} needs a list of asserts "
                "or of {stdin, stdout}, or a pytest file; with `command` only {stdin, stdout}"
            )
        return tests
