"""The Task family: where questions and their gold answers come from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from grpo_lightning.types import Prompt, Question

Split = Literal["train", "val", "test", "predict"]


class Task(ABC):
    """A source of questions. The splits do not overlap, and a split is the same at every call."""

    judge: ClassVar[str | None] = None
    """The reward that decides what is right in validation: its class, by name or import path. None: nothing is known.

    It is made without arguments; `model.validation.judge` overrides it."""

    @abstractmethod
    def questions(self, split: Split) -> Sequence[Question]:
        """The questions of `split`, in a fixed order.

        Raises:
            UsageError: The split does not exist, is empty, or has a bad row; the message names file and line.
        """


class Questions(Protocol):
    """The endless stream of training questions. `PromptDataModule` decides their order."""

    def question(self, index: int) -> Question:
        """The question at `index`, from 0."""

    def prompt(self, question: Question, id: int) -> Prompt:
        """The question as a prompt; `id` keys its random numbers."""
