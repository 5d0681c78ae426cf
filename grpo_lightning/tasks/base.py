"""What a task is: where questions and their gold answers come from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from grpo_lightning.types import Question

Split = Literal["train", "val", "test", "predict"]


class Task(ABC):
    """Where questions come from. The splits do not overlap, and a split is the same at every call."""

    @abstractmethod
    def questions(self, split: Split) -> Sequence[Question]:
        """The rows of `split`, in a fixed order; a row's position is its prompt's id.

        Raises:
            UsageError: The split does not exist, is empty, or has a bad row (the message names file and line).
        """
