"""Procedurally generated puzzles of reasoning-gym and their own scorers (optional extra `reasoning-gym`)."""

import math
from collections.abc import Sequence
from typing import Any

from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.sandbox.pool import LoadError, WorkerPool, inside
from grpo_lightning.tasks.task import Split, Task
from grpo_lightning.types import Question, Sample, Status, UsageError, at_least, require

ENTRIES = inside("gym.entries", __file__)
SCORE = inside("gym.score", __file__)
INSTALL = "pip install grpo-lightning[reasoning-gym]"
METADATA = "reasoning_gym"
"""The key of a question's metadata that holds its `dataset` and the index of its `entry`."""
SECONDS = 600.0
"""Seconds in which the questions of a run must be made."""


class ReasoningGym(Task):
    """One of the generators of reasoning-gym (arXiv 2505.24760), such as `chain_sum`, `countdown` or `knights_knaves`.

    Over a hundred kinds of puzzles, without data and of any difficulty. Score them with `ReasoningGymReward`, which
    knows all right answers; the gold answer is one of them.

    The splits are ranges of one generated dataset: validation has its first `num_val` entries, test (and predict) the
    next `num_val`, training the `num_train` after them. Different seeds would overlap: entry i of seed s is entry i - 1
    of seed s + 1. A question that is in an earlier split is left out.

    Args:
        name: Name of the generator.
        config: Settings of the generator, such as `{min_terms: 2, max_terms: 3}`; the others keep their defaults.
        num_train: Number of questions to train on.
        num_val: Number of questions held out for validation; test has the same number of other questions.
        seed: Seed of the generator.
    """

    grader = "ReasoningGymReward"

    def __init__(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        num_train: int = 8000,
        num_val: int = 500,
        seed: int = 0,
    ) -> None:
        at_least("data.task.num_train", num_train, 1)
        at_least("data.task.num_val", num_val, 1)
        self.name = name
        self.config = config or {}
        for key in ("seed", "size"):
            require(key not in self.config, f"data.task.config: {key} is set by data.task.seed, num_train and num_val")
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        # The arguments that make the same entries in any process.
        self._dataset = {"name": name, "config": self.config, "seed": seed, "size": 2 * num_val + num_train}
        self._entries_so_far: list[tuple[str, str]] = []

    def questions(self, split: Split) -> Sequence[Question]:
        """Returns the questions of a split without the questions of earlier splits."""
        starts = {"val": 0, "test": self.num_val, "predict": self.num_val, "train": 2 * self.num_val}
        require(split in starts, f"split={split!r} of ReasoningGym: use train, val, test or predict")
        start = starts[split]
        # Earlier splits are made too, because no question is in two splits.
        entries = self._entries(start + (self.num_train if split == "train" else self.num_val))
        held_out = {text for text, _ in entries[:start]}
        questions = [
            Question(text, answer, f"{self.name}:{index}", {METADATA: {"dataset": self._dataset, "entry": index}})
            for index, (text, answer) in enumerate(entries)
            if index >= start and text not in held_out
        ]
        if not questions:
            raise UsageError(
                f"data.task.name={self.name}: every {split} question is in an earlier split too; "
                f"make the config harder, or lower data.task.num_val={self.num_val}"
            )
        return questions

    def _entries(self, stop: int) -> list[tuple[str, str]]:
        """Returns questions and answers of the first `stop` entries, made in a worker, where they are scored too."""
        if len(self._entries_so_far) < stop:
            pool = WorkerPool(num_workers=1, timeout=SECONDS, memory_limit_mb=4096)
            try:
                (outcome,) = pool.map(ENTRIES, [[self._dataset, len(self._entries_so_far), stop]])
            except LoadError as error:
                raise UsageError(f"ReasoningGym: {error}. {INSTALL}") from error
            finally:
                pool.close()
            if outcome.status != Status.OK:
                reason = outcome.error or f"{outcome.status}; making {stop} questions may take {SECONDS:.0f} seconds"
                raise UsageError(f"data.task.name={self.name!r}, data.task.config={self.config}: {reason}")
            self._entries_so_far += [(text, answer) for text, answer in outcome.value]
        return self._entries_so_far[:stop]


class ReasoningGymReward(Reward):
    """1 if reasoning-gym's own scorer accepts the final answer, else 0. For questions of the task `ReasoningGym`.

    It knows all right answers of a puzzle, not only the gold one. Many scorers give a fraction to a wrong answer that
    contains the right one, which would pay for listing guesses: it is worth 0. The answer is found as by
    `MathVerifier`, so ask for `<answer></answer>` in the prompt. The scorers run in worker processes, because some
    evaluate the answer as Python.

    Args:
        timeout: CPU seconds per score.
        memory_limit_mb: Memory per worker in MiB, in addition to what its imports need (Linux only).
        num_workers: Number of worker processes.
    """

    finds_answers = True
    gives_verdicts = True
    scores_early = True

    def __init__(
        self,
        timeout: float = 10.0,
        memory_limit_mb: int = 2048,
        num_workers: int = 2,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        self._pool = WorkerPool.computing(num_workers, timeout, memory_limit_mb)

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Imports reasoning-gym in a worker, and checks that the questions are its own."""
        for question in questions:
            source = question.source or "a question"
            require(METADATA in question.metadata, f"reward {self.name}: {source} is not of the task ReasoningGym")
        try:
            self._pool.load(SCORE)
        except LoadError as error:
            raise UsageError(f"reward {self.name}: {error}. {INSTALL}") from error

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Scores the answers that completions have.

        The status is `ok`; `no_answer`, worth 0; or, with NaN, `error` (the scorer's), `timeout`, `memory` or `crash`.
        """
        answers = [extract_answer(sample.whole_turn) for sample in samples]
        answered_rows = [row for row, answer in enumerate(answers) if answer is not None]
        tasks = []
        for row in answered_rows:
            question = samples[row].prompt.question
            metadata = question.metadata[METADATA]
            tasks.append([metadata["dataset"], metadata["entry"], question.text, answers[row]])
        result = RewardResult([0.0] * len(samples), [Status.NO_ANSWER] * len(samples), answers)
        for row, outcome in zip(answered_rows, self._pool.map(SCORE, tasks), strict=True):
            result.status[row] = outcome.status
            result.value[row] = float(outcome.value >= 1) if outcome.status == Status.OK else math.nan
            if outcome.error:
                self.tally.explain(samples[row], outcome.status, outcome.error)
        return result

    def close(self) -> None:
        self._pool.close()
