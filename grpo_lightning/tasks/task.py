"""The Task family: where questions and their gold answers come from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from grpo_lightning.types import Prompt, Question

Split = Literal["train", "val", "test", "predict"]


class Task(ABC):
    """A source of questions. The splits do not overlap, and a split is the same at every call."""

    grader: ClassVar[str | None] = None
    """The grader, the reward that decides what is right: its class, by name or import path. None: nothing is known.

    It is made without arguments; `model.validation.grader` overrides it."""

    @abstractmethod
    def questions(self, split: Split) -> Sequence[Question]:
        """The questions of `split`, in a fixed order.

        Raises:
            UsageError: The split does not exist, is empty, or has a bad row; the message names file and line.
        """


class Questions(Protocol):
    """The endless stream of training questions, as prompts."""

    def ask(self, ids: range) -> list[Prompt]:
        """This rank's prompts of those that are asked under `ids`. Every rank asks, in the order of the ids.

        An order may depend on rewards: a source asks in the main thread, so that a run can be repeated.
        """
