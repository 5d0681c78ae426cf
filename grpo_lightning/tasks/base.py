"""The Task family: where questions and their gold answers come from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from grpo_lightning.types import Question

Split = Literal["train", "val", "test", "predict"]


class Task(ABC):
    """A source of questions. The splits do not overlap, and a split is the same at every call."""

    @abstractmethod
    def questions(self, split: Split) -> Sequence[Question]:
        """The questions of `split`, in a fixed order.

        Raises:
            UsageError: The split does not exist, is empty, or has a bad row; the message names file and line.
        """
