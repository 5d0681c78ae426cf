"""The QuestionOrder family: which training question is asked next."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from grpo_lightning.types import Question, Stateful


class QuestionOrder(Stateful, ABC):
    """The order of the training questions. All ranks ask it alike and tell it the rewards of all: it is one order.

    Its state holds questions that are asked and not observed yet too. It may be given that of another order.
    """

    questions: Sequence[Question]
    seed: int

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        """Takes the questions to choose from, before the first is asked and before `load_state_dict`."""
        self.questions, self.seed = questions, seed

    @abstractmethod
    def next(self, ids: range) -> list[int]:
        """The rows of the questions that are asked under `ids`, which count questions from 0 and key random numbers."""

    def observe(self, rewards: Mapping[int, Sequence[float]]) -> dict[str, float]:
        """Learns from a step as its rollouts are taken; returns metrics of the order by their whole names.

        Args:
            rewards: The grader's values of the completions of each id, by rising ids. NaN: scoring failed.
        """
        return {}


class Shuffled(QuestionOrder):
    """Every question once per pass over the data; each pass has its own order."""

    def __init__(self) -> None:
        self._pass: tuple[int, list[int]] = (-1, [])

    def next(self, ids: range) -> list[int]:
        return [self._row(id) for id in ids]

    def _row(self, id: int) -> int:
        cycle, position = divmod(id, len(self.questions))
        if self._pass[0] != cycle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + cycle)
            self._pass = cycle, torch.randperm(len(self.questions), generator=generator).tolist()
        return self._pass[1][position]
