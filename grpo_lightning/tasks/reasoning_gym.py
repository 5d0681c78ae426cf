"""Procedurally generated puzzles of reasoning-gym (optional extra `reasoning-gym`)."""

from collections.abc import Sequence
from typing import Any

from grpo_lightning.sandbox.pool import LoadError, WorkerPool, inside
from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.types import Question, Status, UsageError, at_least

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
        num_val: Number of questions held out for validation, and as many others for test.
        seed: Seed of the generator.

    Raises:
        UsageError: A number is below 1; or, from `questions`, reasoning-gym is not installed or refuses name or config.
    """

    judge = "ReasoningGymReward"

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
        if reserved := {"size", "seed"} & self.config.keys():
            raise UsageError(f"data.task.config: {min(reserved)} is set by data.task.seed, num_train and num_val")
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self._made: list[tuple[str, str]] = []

    def questions(self, split: Split) -> Sequence[Question]:
        """The questions of `split`, as in `Task.questions`."""
        bounds = {"val": (0, self.num_val), "test": (self.num_val, 2 * self.num_val)}
        bounds["predict"] = bounds["test"]
        bounds["train"] = (2 * self.num_val, 2 * self.num_val + self.num_train)
        if split not in bounds:
            raise UsageError(f"split={split!r} of ReasoningGym: use train, val, test or predict")
        start, stop = bounds[split]
        # Earlier splits are made too, because their questions are not asked again.
        entries = self._entries(stop)
        held_out = {text for text, _ in entries[:start]}
        questions = [
            Question(text, answer, f"{self.name}:{index}", {METADATA: {"dataset": self._dataset, "entry": index}})
            for index, (text, answer) in enumerate(entries)
            if index >= start and text not in held_out
        ]
        if not questions:
            raise UsageError(
                f"data.task.name={self.name}: every {split} question is in an earlier split too; make the config "
                f"harder, or lower data.task.num_val={self.num_val}"
            )
        return questions

    @property
    def _dataset(self) -> dict[str, Any]:
        """The arguments that make the same entries in any process."""
        size = 2 * self.num_val + self.num_train
        return {"name": self.name, "config": self.config, "seed": self.seed, "size": size}

    def _entries(self, stop: int) -> list[tuple[str, str]]:
        """Questions and answers of the first `stop` entries, made in a worker process, where they are scored too."""
        if len(self._made) < stop:
            pool = WorkerPool(num_workers=1, timeout=SECONDS, memory_limit_mb=4096)
            try:
                (outcome,) = pool.map(inside("gym.entries"), [[self._dataset, len(self._made), stop]])
            except LoadError as error:
                raise UsageError(f"ReasoningGym: {error}. pip install grpo-lightning[reasoning-gym]") from error
            finally:
                pool.close()
            if outcome.status != Status.OK:
                why = outcome.error or f"{outcome.status}; making {stop} questions may take {SECONDS:.0f} seconds"
                raise UsageError(f"data.task.name={self.name!r}, data.task.config={self.config}: {why}")
            self._made += [(text, answer) for text, answer in outcome.value]
        return self._made[:stop]
