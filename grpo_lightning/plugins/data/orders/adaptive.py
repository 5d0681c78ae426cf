"""The base of orders that depend on rewards: it knows the questions that are asked and not observed yet."""

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
    """An order that depends on the rewards of earlier groups. Derive from it: choose a row, learn from a group."""

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        super().setup(questions, seed)
        self.asked: dict[int, int] = {}  # the row of each id that is asked and not observed yet
        self.checksum = crc32("".join(question.text for question in questions).encode())

    @abstractmethod
    def choose(self, id: int) -> int:
        """The row that is asked under `id`."""

    @abstractmethod
    def learn(self, row: int, rewards: list[float]) -> None:
        """Learns from the rewards of one group of this row, of which there is at least one."""

    def learned(self) -> dict[str, float]:
        """Ends the observation of a step; returns the metrics."""
        return {}

    def next(self, ids: range) -> list[int]:
        for id in ids:
            if id not in self.asked:  # what is drawn ahead is asked again after a resume
                self.asked[id] = self.choose(id)
        return [self.asked[id] for id in ids]

    def observe(self, rewards: Mapping[int, Sequence[float]]) -> dict[str, float]:
        for id, values in rewards.items():
            row, scored = self.asked.pop(id, None), [value for value in values if not math.isnan(value)]
            if row is not None and scored:
                self.learn(row, scored)
        return self.learned()

    def chance(self, id: int) -> Random:
        """The random numbers of one id."""
        return Random(f"{self.seed} {id}")

    def state_dict(self) -> dict[str, Any]:
        return {"order": type(self).__name__, "checksum": self.checksum, "asked": {**self.asked}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begins anew after another order, and with other questions."""
        own = type(self).__name__, self.checksum
        if (state.get("order"), state.get("checksum")) == own:
            self.asked = {**state["asked"]}
            self.restore(state)
        else:
            rank_zero_only(log.warning)(
                "data.order=%s: other questions or another order before: it begins anew", own[0]
            )

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restores what the order's own `state_dict` adds."""


class Stream:
    """The endless shuffled stream of some rows, and how many of them were taken."""

    def __init__(self, questions: Sequence[Question], rows: Iterable[int], seed: int) -> None:
        self.rows, self.taken, self._order = [*rows], 0, Shuffled()
        self._order.setup([questions[row] for row in self.rows], seed)

    def take(self) -> int:
        """The next row."""
        [index] = self._order.next(range(self.taken, self.taken + 1))
        self.taken += 1
        return self.rows[index]
