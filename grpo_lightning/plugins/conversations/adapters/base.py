"""The common part of environments of other libraries: an extra to install, and questions that are seeds."""

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from grpo_lightning.plugins.conversations.base import Environment
from grpo_lightning.tasks.base import Split, Task
from grpo_lightning.types import Question, at_least, require

SEED = "seed"  # the key of a question's metadata that holds its seed


class Seeds(Environment, Task):
    """An environment of another library that makes up what it asks, from a seed per question.

    Validation has the first `num_val` seeds, test (and predict) the next `num_val`, training the ones after them.

    Args:
        label: What stands before the seed in the question's text, which the policy does not see.
        num_train: Seeds to train on.
        num_val: Seeds held out for validation, and as many others for test.

    Raises:
        UsageError: The library is not installed.
    """

    judge = "EnvironmentReward"
    module: str  # the one that is imported
    extra: str  # the one that installs it

    def __init__(self, label: str, num_train: int, num_val: int) -> None:
        package = self.module.partition(".")[0]
        is_there = find_spec(package) is not None
        require(is_there, f"{package} is not installed: pip install grpo-lightning[{self.extra}]")
        at_least("num_train", num_train, 1, type(self).__name__)
        at_least("num_val", num_val, 1, type(self).__name__)
        self.label, self.num_train, self.num_val = label, num_train, num_val

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Imports the library, once for all processes that are copied from this one."""
        self.__dict__ |= state
        _ = self.library

    @property
    def library(self) -> Any:
        """The module."""
        return importlib.import_module(self.module)

    def questions(self, split: Split) -> Sequence[Question]:
        """The seeds of a split."""
        bounds = {"val": (0, self.num_val), "train": (2 * self.num_val, 2 * self.num_val + self.num_train)}
        seeds = range(*bounds.get(split, (self.num_val, 2 * self.num_val)))
        return [Question(f"{self.label}, seed {one}", "", f"{self.label}:{one}", {SEED: one}) for one in seeds]
