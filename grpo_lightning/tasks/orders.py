"""The QuestionOrder family: which training question is asked next."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from grpo_lightning.types import Question, Stateful


class QuestionOrder(Stateful, ABC):
    """The order of the training questions. Every rank makes the same calls, with the rewards of all ranks.

    Its state also holds questions that are asked and not observed yet. The state of another order may be loaded too.
    """

    questions: Sequence[Question]
    """The questions to choose from, set by `setup`."""
    seed: int
    """The seed of the run, set by `setup`."""

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        """Takes the questions to choose from, before the first `next` and before `load_state_dict`."""
        self.questions, self.seed = questions, seed

    @abstractmethod
    def next(self, ids: range) -> list[int]:
        """Returns the index of the question that is asked under each id.

        Ids count asked questions from 0, and key random numbers.
        """

    def observe(self, rewards: Mapping[int, Sequence[float]]) -> dict[str, float]:
        """Learns from a step when the loop takes its rollouts; returns metrics of the order by their full names.

        Args:
            rewards: The grader's values of the completions of each id, in the order of the ids. NaN: scoring failed.
        """
        return {}


class Shuffled(QuestionOrder):
    """Asks every question once per pass over the data, in a new random order for each pass."""

    def __init__(self) -> None:
        self._pass: tuple[int, list[int]] = (-1, [])
        """The number of a pass, and its order of the questions."""

    def next(self, ids: range) -> list[int]:
        return [self._row(id) for id in ids]

    def _row(self, id: int) -> int:
        number, position = divmod(id, len(self.questions))
        if self._pass[0] != number:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._pass = number, torch.randperm(len(self.questions), generator=generator).tolist()
        return self._pass[1][position]
