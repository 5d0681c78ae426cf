"""The Task family: where questions and their gold answers come from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from grpo_lightning.types import Prompt, Question

Split = Literal["train", "val", "test", "predict"]


class Task(ABC):
    """A source of questions. The splits do not overlap, and a split is the same at every call."""

    grader: ClassVar[str | None] = None
    """The class of the grader, the reward that decides what is right: its name or import path. None: no known grader.

    The grader is made without arguments; `model.validation.grader` overrides it."""

    @abstractmethod
    def questions(self, split: Split) -> Sequence[Question]:
        """Returns the questions of `split`, in a fixed order.

        Raises:
            UsageError: The split does not exist, is empty, or has a bad row; the message names file and line.
        """


class Questions(Protocol):
    """The endless stream of training questions, as prompts."""

    def ask(self, ids: range) -> list[Prompt]:
        """Returns this rank's prompts among the prompts that are asked under `ids`.

        Every rank makes the call, in the order of the ids. The order of the questions may depend on rewards: a source
        calls from the main thread, so that a run can be repeated.
        """
