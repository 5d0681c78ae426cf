"""The reward that is a function of the user's."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from grpo_lightning.rewards.base import OK, Reward, RewardResult
from grpo_lightning.rewards.workers import LoadError, Outcome, WorkerPool
from grpo_lightning.types import Question, Sample, UsageError

log = logging.getLogger(__name__)

NOT_A_NUMBER = "not_a_number"


class FunctionReward(Reward):
    """What a function of yours makes of a sample: `def shorter(sample): return -len(sample.token_ids)`.

    It is called once a sample, in a worker process. `sample` has `prompt` and `question` (texts), `text` (the
    completion), `answer` (gold), `token_ids`, `truncated` and `metadata` (the row's other columns). It
    returns a finite number. If it hangs, raises or takes too much memory, the sample is counted and left out.

    Args:
        function: Where it is: `my_rewards.shorter`, `my_rewards:shorter` or `path/to/my_rewards.py:shorter`.
        timeout: Seconds one call may take; importing its module does not count.
        memory_limit_mb: Memory one worker may use on top of what its imports took, in MiB (Linux only).
        workers: Number of worker processes.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics, by default the function's.

    Raises:
        UsageError: `function` is not such a path; or, before the run starts, cannot be imported.
    """

    def __init__(
        self,
        function: str,
        timeout: float = 10.0,
        memory_limit_mb: int = 4096,
        workers: int = 2,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        own_name = function.replace(":", ".").rpartition(".")[2]
        if not own_name.isidentifier() or own_name == function or (".py" in function and ":" not in function):
            raise UsageError(
                f"function={function!r}: give an import path, "
                "such as my_rewards.shorter or path/to/my_rewards.py:shorter"
            )
        super().__init__(weight, name or own_name)
        self.function = function
        self._pool = WorkerPool(workers, timeout, memory_limit_mb)
        self._warned: set[str] = set()

    def prepare(self, questions: Sequence[Question]) -> None:
        """Imports the function in a worker, to say at once that it cannot be."""
        try:
            self._pool.load(self.function)
        except LoadError as error:
            raise UsageError(
                f"function={self.function!r} of the reward {self.name}: {error}. Give the import path of a "
                "function; its module is looked for where `import` looks, and in the working directory"
            ) from error

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Status `ok`, or, with a value of NaN, `error`, `timeout`, `memory`, `crash` or `not_a_number`."""
        outcomes = self._pool.map(self.function, [_as_task(sample) for sample in samples])
        result = RewardResult([], [])
        for sample, outcome in zip(samples, outcomes, strict=True):
            status = NOT_A_NUMBER if outcome.status == OK and not _is_finite(outcome.value) else outcome.status
            result.value.append(float(outcome.value) if status == OK else math.nan)
            result.status.append(status)
            if status != OK:
                self._warn(status, outcome, sample)
        return result

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def _warn(self, status: str, outcome: Outcome, sample: Sample) -> None:
        if status not in self._warned:
            self._warned.add(status)
            why = f"it returned {outcome.value!r}" if status == NOT_A_NUMBER else outcome.error or status
            log.warning(
                "reward %s failed on a sample of %s: %s (said once; the metrics count the status %s)",
                self.name, sample.prompt.question.source or "the task", why, status,
            )  # fmt: skip


def _as_task(sample: Sample) -> dict[str, Any]:
    question = sample.prompt.question
    return {
        "prompt": sample.prompt.text,
        "question": question.text,
        "text": sample.text,
        "answer": question.answer,
        "token_ids": sample.token_ids,
        "truncated": sample.truncated,
        "metadata": question.metadata,
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
