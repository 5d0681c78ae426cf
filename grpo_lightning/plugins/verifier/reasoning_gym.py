"""The reward of reasoning-gym's puzzles: their own scorers."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from grpo_lightning.plugins.verifier.extraction import extract_answer
from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.sandbox.pool import LoadError, WorkerPool, inside
from grpo_lightning.tasks.reasoning_gym import METADATA
from grpo_lightning.types import Question, Sample, Status, UsageError

log = logging.getLogger(__name__)


class ReasoningGymReward(Reward):
    """1 if reasoning-gym's own scorer accepts the final answer, else 0. For questions of the task `ReasoningGym`.

    It knows all right answers of a puzzle, not only the gold one. The answer is found as by `MathVerifier`, so ask for
    `<answer></answer>` in the prompt. The scorers run in worker processes, because some evaluate the answer as Python.

    Args:
        partial_credit: Use the scorer's number as it is. Many scorers give a fraction to a wrong answer that contains
            the right one, which pays for listing guesses.
        timeout: Seconds per score.
        memory_limit_mb: Memory per worker in MiB, in addition to what its imports need (Linux only).
        num_workers: Number of worker processes.
        weight: Factor of this reward in the total. At 0 it is scored and logged, but not learned from.
        name: Its name in the metrics.

    Raises:
        UsageError: Before the run starts: reasoning-gym cannot be imported, or the questions are not from it.
    """

    finds_answers = True
    scores_early = True

    def __init__(
        self,
        partial_credit: bool = False,
        timeout: float = 10.0,
        memory_limit_mb: int = 2048,
        num_workers: int = 2,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        self.partial_credit = partial_credit
        self._pool = WorkerPool(num_workers, timeout, memory_limit_mb)
        self._warned = False

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Imports reasoning-gym in a worker, and checks that the questions are its own."""
        for question in questions:
            if METADATA not in question.metadata:
                source = question.source or "a question"
                raise UsageError(f"reward {self.name}: {source} is not of the task ReasoningGym")
        try:
            self._pool.load(inside("gym.score"))
        except LoadError as error:
            raise UsageError(f"reward {self.name}: {error}. pip install grpo-lightning[reasoning-gym]") from error

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Status `ok`; `no_answer`, worth 0; or, with NaN, `error` (the scorer's), `timeout`, `memory` or `crash`."""
        answers = [extract_answer(sample.whole_turn) for sample in samples]
        asked = [row for row, answer in enumerate(answers) if answer is not None]
        tasks = [_task(samples[row].prompt.question, answers[row]) for row in asked]
        result = RewardResult([0.0] * len(samples), [Status.NO_ANSWER] * len(samples), answers)
        for row, outcome in zip(asked, self._pool.map(inside("gym.score"), tasks), strict=True):
            result.status[row] = outcome.status
            if outcome.status == Status.OK:
                result.value[row] = outcome.value if self.partial_credit else float(outcome.value >= 1)
            else:
                result.value[row] = math.nan
                self._warn(samples[row], answers[row], outcome.error or outcome.status)
        return result

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def _warn(self, sample: Sample, answer: str | None, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "reward %s failed on the answer %.80r to %s: %s (logged once)",
                self.name, answer, sample.prompt.question.source, why,
            )  # fmt: skip


def _task(question: Question, answer: str | None) -> list[Any]:
    where = question.metadata[METADATA]
    return [where["dataset"], where["entry"], question.text, answer]
