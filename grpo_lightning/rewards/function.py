"""A reward that is a function of the user."""

import inspect
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from grpo_lightning import ranks
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward, Run, described, rows_by_prompt
from grpo_lightning.sandbox.pool import WAITING, LoadError, Outcome, WorkerPool
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, Status, UsageError

log = logging.getLogger(__name__)


class FunctionReward(Reward):
    """Scores with a function that you write: `def shorter(sample): return -len(sample.token_ids)`.

    This is the shortest way to a new reward, since it needs no class. Wherever a reward is expected, the import path of
    a function stands for it, `rewards: [my_rewards.shorter]`, and in Python the function itself. The name of its
    argument decides what it gets:

    - `def f(sample)` gets one completion and returns a finite number;
    - `def f(samples)` gets a list of the completions of one prompt, and returns a list of as many numbers. It can
      compare them. The greedy answer of a validation comes alone. With `group: true` the argument may have any name.

    Each completion has

    - `text`, what the policy wrote, without stop and special tokens; `turn`, the same after `data.answer_prefix`;
    - `question`, as the data has it; `prompt`, the same in the template; `answer`, the gold answer;
    - `metadata`, a dict of the row's other columns;
    - `token_ids`, all sampled tokens; `truncated`, whether the completion was cut off at the limit of tokens.

    The function runs in worker processes, where an `async def` is awaited. If it hangs, raises or needs too much
    memory, the sample, or the group, is counted and left out. Processes that it starts and its temporary files end with
    its worker. Before the run it is called once, with the first gold answer as the completion. A failure there is a
    warning.

    Args:
        function: Its import path: `my_rewards.shorter`, `my_rewards:shorter` or `path/to/my_rewards.py:shorter`.
        timeout: CPU seconds per call; importing its module does not count. A call that waits, for a server or in a
            sleep, is ended after ten times as long. So other work on the machine costs no sample.
        memory_limit_mb: Memory per worker in MiB, in addition to what its imports need (Linux only). No file that it
            writes may be larger.
        num_workers: Number of worker processes.
        concurrency: Samples under way at once in one worker. More than 1 requires an `async def`, for example one that
            waits for a server. Each call may wait as long as a single one.
        group: Hands the function a prompt's completions together.
        name: Its name in the metrics; by default the function's name.
    """

    scores_early = True
    may_skip: ClassVar[bool] = False
    """True if the function may return None for a sample that it does not apply to."""

    def __init__(
        self,
        function: str,
        timeout: float = 10.0,
        memory_limit_mb: int = 4096,
        num_workers: int = 2,
        concurrency: int = 1,
        group: bool = False,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        path = function if isinstance(function, str) else ""
        function_name = path.replace(":", ".").rpartition(".")[2]
        if not function_name.isidentifier() or function_name == path or (".py" in path and ":" not in path):
            raise UsageError(
                f"function={function!r}: give its import path as text, such as 'my_rewards.shorter' or "
                "'path/to/my_rewards.py:shorter': worker processes import it"
            )
        super().__init__(weight, name or function_name)
        if concurrency < 1 or not timeout > 0:
            raise UsageError(f"concurrency={concurrency}, timeout={timeout} of {self.name}: give 1 or more, above 0")
        self.function = function
        self.concurrency = concurrency
        self.group = group
        # Several calls at once wait for a server.
        self.grades_cheaply = concurrency == 1
        patience = WAITING * timeout
        self._call = function if concurrency == 1 else f"async {patience} {function}"
        # Calls that are awaited together have a deadline each; the pool's deadline is for a call that blocks.
        self._pool = WorkerPool(num_workers, patience if concurrency == 1 else patience + 1, memory_limit_mb, timeout)
        self._compares: bool | None = None
        """True if the function gets the samples of a prompt together; None before it is imported."""

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Imports the function, and tries it, so that mistakes come to light before the run."""
        self._import()
        for question in questions[:1] if ranks.rank() == 0 else ():
            probe = Sample(Prompt(0, question.text, [0], question), question.answer, [0], FinishReason.STOP)
            (outcome,) = self._outcomes([probe])
            if outcome.status not in (Status.OK, Status.NOT_APPLICABLE):
                log.warning(
                    "reward %s fails on %r, made up as a completion for %s: %s",
                    self.name,
                    question.answer[:80],
                    question.source or "the first question",
                    outcome.error,
                )

    def setup(self, run: Run) -> None:
        self._import()

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Gives the status `ok`, or, with a value of NaN, `error`, `timeout`, `memory`, `crash` or `not_a_number`."""
        result = RewardResult([], [])
        for sample, outcome in zip(samples, self._outcomes(samples), strict=True):
            result.value.append(float(outcome.value) if outcome.status == Status.OK else math.nan)
            result.status.append(outcome.status)
            if outcome.status not in (Status.OK, Status.NOT_APPLICABLE):
                self.tally.explain(sample, outcome.status, outcome.error)
        return result

    def close(self) -> None:
        self._pool.close()

    def _import(self) -> None:
        """Imports the function in a worker, and finds out what it takes."""
        key = f"function={self.function!r} of the reward {self.name}"
        try:
            arguments = self._pool.load(self._call)
        except LoadError as error:
            raise UsageError(
                f"{key}: {error}. Give the import path of a function; its module is looked for where `import` looks, "
                "and in the working directory"
            ) from error
        self._take(key, arguments)

    def _take(self, key: str, arguments: list[str]) -> None:
        """Decides by the names of its required arguments what the function gets.

        Args:
            key: The function and the reward, for messages.
            arguments: The names.
        """
        if {"prompts", "completions", "completion_ids"} & {*arguments}:
            raise UsageError(
                f"{key} takes ({', '.join(arguments)}), as TRL's reward functions do: give it to the class TRLReward, "
                f"{{class_path: TRLReward, init_args: {{function: {self.function}}}}}"
            )
        if len(arguments) > 1:
            raise UsageError(
                f"{key} takes ({', '.join(arguments)}). Write `def f(sample)`, which gets one completion and returns a "
                "number, or `def f(samples)`, which gets those of one prompt and returns a list of numbers; read "
                "sample.text, sample.answer, sample.metadata"
            )
        self._compares = self.group or arguments == ["samples"]
        if self._compares:
            # It waits for the whole group.
            self.scores_early = False

    def _outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Returns the outcome for each sample; it is `ok` if its value is a finite number."""
        if self._compares is None:
            self._import()
        if not self._compares:
            return [_checked(outcome) for outcome in self._called([_as_task(sample) for sample in samples])]
        groups = rows_by_prompt(samples)
        outcomes = self._called([self._group_task([samples[row] for row in rows]) for rows in groups])
        outcome_by_row: dict[int, Outcome] = {}
        for rows, outcome in zip(groups, outcomes, strict=True):
            outcome_by_row |= zip(rows, self._per_sample(outcome, len(rows)), strict=True)
        return [outcome_by_row[row] for row in range(len(samples))]

    def _group_task(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Returns the task of a function that gets the samples of a prompt together."""
        return {"samples": [_as_task(sample) for sample in samples]}

    def _per_sample(self, outcome: Outcome, size: int) -> list[Outcome]:
        """Returns the outcome of each of `size` samples that the function got together."""
        values = outcome.value
        if outcome.status != Status.OK:
            return [_checked(outcome)] * size
        if isinstance(values, list) and len(values) == size:
            skipped = Outcome(Status.NOT_APPLICABLE)
            return [
                skipped if value is None and self.may_skip else _checked(Outcome(Status.OK, value)) for value in values
            ]
        error = f"it returned {described(values)} for {size} samples; return a list of as many numbers"
        return [Outcome(Status.NOT_A_NUMBER, None, error)] * size

    def _called(self, tasks: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Returns the outcome of each call, `concurrency` of them at once. Calls lost together are made again alone."""
        if self.concurrency == 1:
            return self._pool.map(self._call, tasks)
        chunks = [list(tasks[start : start + self.concurrency]) for start in range(0, len(tasks), self.concurrency)]
        outcomes: list[Outcome] = []
        for chunk, chunk_outcome in zip(chunks, self._pool.map(self._call, chunks), strict=True):
            is_lost = chunk_outcome.status != Status.OK and len(chunk) > 1
            for outcome in self._pool.map(self._call, [[task] for task in chunk]) if is_lost else [chunk_outcome]:
                outcomes += [Outcome(**reply) for reply in outcome.value] if outcome.status == Status.OK else [outcome]
        return outcomes


def as_reward(reward: Any) -> Reward:
    """Returns the reward itself, or a `FunctionReward` of a plain function."""
    if isinstance(reward, Reward):
        return reward
    if not inspect.isfunction(reward):
        raise UsageError(f"{described(reward)} is no reward: give an object of a class of rewards, or a function")
    module, name = reward.__module__, reward.__qualname__
    if module == "__main__":
        # Worker processes have another `__main__`.
        module = getattr(sys.modules[module], "__file__", "")
    if not module or not name.isidentifier():
        raise UsageError(f"{name}: worker processes import a function by its name: write it at the top of a file")
    return FunctionReward(f"{module}:{name}")


def _as_task(sample: Sample) -> dict[str, Any]:
    question = sample.prompt.question
    columns = {name: getattr(sample, name) for name in ("text", "turn", "answer", "token_ids", "truncated")}
    return columns | {"prompt": sample.prompt.text, "question": question.text, "metadata": question.metadata}


def _checked(outcome: Outcome) -> Outcome:
    """Returns the outcome, which has failed unless the value is a finite number; a failure is in words."""
    value = outcome.value
    if outcome.status != Status.OK:
        return Outcome(outcome.status, None, outcome.error or outcome.status)
    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return outcome
    return Outcome(Status.NOT_A_NUMBER, None, f"it returned {described(value)}; return a finite number")
