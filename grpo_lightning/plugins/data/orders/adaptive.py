"""The base of orders that depend on rewards: it remembers which questions wait for their rewards."""

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any
from zlib import crc32

from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.tasks.orders import QuestionOrder, Shuffled
from grpo_lightning.types import Question

log = logging.getLogger(__name__)


class Adaptive(QuestionOrder):
    """An order that depends on the rewards of earlier groups. Derive from it, with a `choose` and a `learn`."""

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        super().setup(questions, seed)
        self.row_by_id: dict[int, int] = {}
        """The rows that wait for their rewards, by the id under which each is asked."""
        self.checksum = crc32("".join(question.text for question in questions).encode())

    @abstractmethod
    def choose(self, id: int) -> int:
        """Returns the row that is asked under `id`."""

    @abstractmethod
    def learn(self, row: int, rewards: list[float]) -> None:
        """Learns from a group's rewards, of which there is at least one.

        Args:
            row: The row that the group answers.
            rewards: Total rewards of its completions, without NaN.
        """

    def learned(self) -> dict[str, float]:
        """Ends the observation of a step; returns the metrics."""
        return {}

    def next(self, ids: range) -> list[int]:
        for id in ids:
            if id not in self.row_by_id:  # an id that was sampled ahead comes a second time after a resume
                self.row_by_id[id] = self.choose(id)
        return [self.row_by_id[id] for id in ids]

    def observe(self, rewards: Mapping[int, Sequence[float]]) -> dict[str, float]:
        for id, group_rewards in rewards.items():
            row = self.row_by_id.pop(id, None)
            scored = [reward for reward in group_rewards if not math.isnan(reward)]
            if row is not None and scored:
                self.learn(row, scored)
        return self.learned()

    def chance(self, id: int) -> Random:
        """Returns the random numbers of an id."""
        return Random(f"{self.seed} {id}")

    def state_dict(self) -> dict[str, Any]:
        return {"order": type(self).__name__, "checksum": self.checksum, "asked": {**self.row_by_id}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of the same order of the same questions; otherwise begins anew, with a warning."""
        name = type(self).__name__
        if (state.get("order"), state.get("checksum")) == (name, self.checksum):
            self.row_by_id = {**state["asked"]}
            self.restore(state)
        else:
            rank_zero_only(log.warning)("data.order=%s: other questions or another order before: it begins anew", name)

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restores the entries that the derived class adds to `state_dict`."""


class RowStream:
    """An endless shuffled stream of some rows."""

    def __init__(self, questions: Sequence[Question], rows: Iterable[int], seed: int) -> None:
        self.rows = [*rows]
        self.num_taken = 0
        self._order = Shuffled()
        self._order.setup([questions[row] for row in self.rows], seed)

    def take(self) -> int:
        """Takes the next row."""
        [index] = self._order.next(range(self.num_taken, self.num_taken + 1))
        self.num_taken += 1
        return self.rows[index]
