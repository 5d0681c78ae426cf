"""Procedurally generated puzzles of reasoning-gym (optional extra `reasoning-gym`)."""

from collections.abc import Sequence
from typing import Any

from grpo_lightning.sandbox.pool import OK, LoadError, WorkerPool, inside
from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.types import Question, UsageError

METADATA = "reasoning_gym"
"""Key of a question's metadata that says which `entry` of which `dataset` it is."""

SECONDS = 600.0
"""How long the questions of a run may take to be made."""


class ReasoningGym(Task):
    """One of the generators of reasoning-gym (arXiv 2505.24760), such as `chain_sum`, `countdown` or `knights_knaves`.

    The splits are stretches of one generated dataset: validation its first `num_val` entries, test (and predict) the
    next, training the `num_train` behind them. Seeds would not do: entry i of seed s is entry i - 1 of seed s + 1. A
    question that stands in an earlier split already is left out. Score it with `ReasoningGymReward`, which knows all
    right answers; the gold answer is one of them.

    Args:
        name: The generator.
        config: Its own settings, such as `{min_terms: 2, max_terms: 3}`; the rest have its defaults.
        num_train: Questions to train on.
        num_val: Questions held out for validation, and as many others for test.
        seed: Of the generator.

    Raises:
        UsageError: A number is below 1. And of `questions`: reasoning-gym is not installed, or refuses name or config.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        num_train: int = 8000,
        num_val: int = 500,
        seed: int = 0,
    ) -> None:
        if num_train < 1 or num_val < 1:
            raise UsageError(f"task.num_train={num_train}, task.num_val={num_val}: give 1 or more")
        self.name = name
        self.config = config or {}
        if reserved := {"size", "seed"} & self.config.keys():
            raise UsageError(f"task.config: {min(reserved)} is set by task.seed, task.num_train and task.num_val")
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self._made: list[tuple[str, str]] = []

    def questions(self, split: Split) -> Sequence[Question]:
        """The entries of `split`; see `Task.questions`."""
        bounds = {"val": (0, self.num_val), "test": (self.num_val, 2 * self.num_val)}
        bounds["predict"] = bounds["test"]
        bounds["train"] = (2 * self.num_val, 2 * self.num_val + self.num_train)
        if split not in bounds:
            raise UsageError(f"split={split!r} of ReasoningGym: use train, val, test or predict")
        start, stop = bounds[split]
        # Test needs the validation questions too, training those of both: what they hold is not asked again.
        entries = self._entries(stop)
        held_out = {text for text, _ in entries[:start]}
        questions = [
            Question(text, answer, f"{self.name}:{index}", {METADATA: {"dataset": self._dataset, "entry": index}})
            for index, (text, answer) in enumerate(entries)
            if index >= start and text not in held_out
        ]
        if not questions:
            raise UsageError(
                f"task.name={self.name}: every {split} question stands in an earlier split too; make the config "
                f"harder, or lower task.num_val={self.num_val}"
            )
        return questions

    @property
    def _dataset(self) -> dict[str, Any]:
        """What makes the same entries in any process."""
        size = 2 * self.num_val + self.num_train
        return {"name": self.name, "config": self.config, "seed": self.seed, "size": size}

    def _entries(self, stop: int) -> list[tuple[str, str]]:
        """Questions and answers of the first `stop` entries, made where they are scored: in a worker process."""
        if len(self._made) < stop:
            pool = WorkerPool(num_workers=1, timeout=SECONDS, memory_limit_mb=4096)
            try:
                (outcome,) = pool.map(inside("gym.entries"), [[self._dataset, len(self._made), stop]])
            except LoadError as error:
                raise UsageError(f"ReasoningGym: {error}. pip install grpo-lightning[reasoning-gym]") from error
            finally:
                pool.close()
            if outcome.status != OK:
                why = outcome.error or f"{outcome.status}; making {stop} questions may take {SECONDS:.0f} seconds"
                raise UsageError(f"task.name={self.name!r}, task.config={self.config}: {why}")
            self._made += [(text, answer) for text, answer in outcome.value]
        return self._made[:stop]
