"""A reward that is the user's own function."""

import math
from collections.abc import Sequence
from typing import Any

from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.sandbox.pool import LoadError, Outcome, WorkerPool
from grpo_lightning.types import Question, Sample, Status, UsageError


class FunctionReward(Reward):
    """The number that your own function returns: `def shorter(sample): return -len(sample.token_ids)`.

    It needs no class: the shortest way to a reward of your own. It is called once per sample, in a worker process; an
    `async def` is awaited there. `sample` has `prompt` and `question` (texts), `text` (the completion), `turn`
    (the same after its answer prefix), `answer` (gold), `token_ids`, `truncated` and `metadata` (the row's other
    columns). It must return a finite number. If it
    hangs, raises or needs too much memory, the sample is counted and left out.

    Args:
        function: Its import path: `my_rewards.shorter`, `my_rewards:shorter` or `path/to/my_rewards.py:shorter`.
        timeout: Seconds per call; importing its module does not count.
        memory_limit_mb: Memory per worker in MiB, in addition to what its imports need (Linux only).
        num_workers: Number of worker processes.
        concurrency: Samples under way at once in one worker. More than 1 requires an `async def`, for example one that
            waits for a server. Each call has its own `timeout`.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics; by default the function's name.

    Raises:
        UsageError: `function` is not an import path; or, before the run starts, it cannot be imported.
    """

    scores_early = True

    def __init__(
        self,
        function: str,
        timeout: float = 10.0,
        memory_limit_mb: int = 4096,
        num_workers: int = 2,
        concurrency: int = 1,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        if not isinstance(function, str):
            raise UsageError(
                f"function={function!r}: give its import path as text, such as 'my_rewards.shorter'. Worker processes "
                "import it: it must be in a module, by a name of its own"
            )
        own_name = function.replace(":", ".").rpartition(".")[2]
        if not own_name.isidentifier() or own_name == function or (".py" in function and ":" not in function):
            raise UsageError(
                f"function={function!r}: give an import path, "
                "such as my_rewards.shorter or path/to/my_rewards.py:shorter"
            )
        super().__init__(weight, name or own_name)
        if concurrency < 1 or not timeout > 0:
            raise UsageError(f"concurrency={concurrency}, timeout={timeout} of {self.name}: give 1 or more, above 0")
        self.function = function
        self.concurrency = concurrency
        self._call = function if concurrency == 1 else f"async {timeout} {function}"
        # Calls that are awaited together have their own deadlines; this one is for a call that blocks.
        self._pool = WorkerPool(num_workers, timeout if concurrency == 1 else timeout + 1, memory_limit_mb)

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Imports the function in a worker, so that a wrong path is refused before the run."""
        try:
            self._pool.load(self._call)
        except LoadError as error:
            raise UsageError(
                f"function={self.function!r} of the reward {self.name}: {error}. Give the import path of a "
                "function; its module is looked for where `import` looks, and in the working directory"
            ) from error

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Status `ok`, or, with a value of NaN, `error`, `timeout`, `memory`, `crash` or `not_a_number`."""
        tasks = [_as_task(sample) for sample in samples]
        outcomes = self._pool.map(self._call, tasks) if self.concurrency == 1 else self._together(tasks)
        result = RewardResult([], [])
        for sample, outcome in zip(samples, outcomes, strict=True):
            status = (
                Status.NOT_A_NUMBER if outcome.status == Status.OK and not _is_finite(outcome.value) else outcome.status
            )
            result.value.append(float(outcome.value) if status == Status.OK else math.nan)
            result.status.append(status)
            if status != Status.OK:
                why = f"it returned {outcome.value!r}" if status == Status.NOT_A_NUMBER else outcome.error or status
                self.tally.explain(sample, status, why)
        return result

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def _together(self, tasks: Sequence[dict[str, Any]]) -> list[Outcome]:
        """The outcome of each task, `concurrency` of them at once. Tasks that were lost together run again alone."""
        chunks = [list(tasks[start : start + self.concurrency]) for start in range(0, len(tasks), self.concurrency)]
        outcomes: list[Outcome] = []
        for chunk, outcome in zip(chunks, self._pool.map(self._call, chunks), strict=True):
            if outcome.status != Status.OK and len(chunk) > 1:
                alone = self._pool.map(self._call, [[task] for task in chunk])
            else:
                alone = [outcome]
            for one in alone:
                outcomes += [Outcome(**reply) for reply in one.value] if one.status == Status.OK else [one]
        return outcomes


def _as_task(sample: Sample) -> dict[str, Any]:
    question = sample.prompt.question
    return {
        "prompt": sample.prompt.text,
        "question": question.text,
        "text": sample.text,
        "turn": sample.turn,
        "answer": question.answer,
        "token_ids": sample.token_ids,
        "truncated": sample.truncated,
        "metadata": question.metadata,
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
