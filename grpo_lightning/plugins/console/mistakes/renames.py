"""Names of version 0.2: each still works, with one warning that says the new name."""

import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin

from jsonargparse import Namespace

CLASSES = {
    "Ahead": "OneStepOffPolicy",
    "Stream": "FullyAsynchronous",
    "AllSettled": "AllConverged",
    "spread": "per_element",
}
"""The new name of a class or a function, by its old one."""

ARGUMENTS = {
    "Validation": ("judge", "grader"),
    "Benchmark": ("judge", "grader"),
    "LearnedReward": ("labeller", "grader"),
}
"""The old and the new name of an argument, by its class."""

OLD_FLAG = re.compile(r"--[\w.]*(validations?[\w.]*\.judge|\.labeller)(?![\w.])")
"""The same arguments in an option of the command line, which may go on with `=value`."""

VALUES = {"drawn": "sampled", "moving": "has_advantage"}
"""New values of arguments that take a word of a list."""


@cache
def warn(old: str, new: str) -> None:
    """Warns once that a name has changed."""
    warnings.warn(f"{old} is called {new} now; the old name still works", FutureWarning, stacklevel=2)


def new_class(name: str) -> str:
    """Returns the name that a class has now."""
    prefix, dot, old = name.rpartition(".")
    if prefix not in ("", "grpo_lightning") or old not in CLASSES:
        return name
    warn(old, CLASSES[old])
    return prefix + dot + CLASSES[old]


def new_flags(words: Sequence[str]) -> list[str]:
    """Returns the options with the names that they have now."""

    def new_flag(match: re.Match[str]) -> str:
        old = match.group().strip("-")
        new = old.rpartition(".")[0] + ".grader"
        warn(old, new)
        return f"--{new}"

    return [OLD_FLAG.sub(new_flag, word) if word.startswith("--") else word for word in words]


def new_value(value: Any, hint: Any) -> Any:
    """Returns a value of the configuration, for an argument of the type `hint`, with the names that are used now."""
    if get_origin(hint) is Literal and value not in get_args(hint) and VALUES.get(value) in get_args(hint):
        warn(value, VALUES[value])
        return VALUES[value]
    if not isinstance(value, dict | Namespace):
        return value
    class_name = str(value.get("class_path", getattr(hint, "__name__", ""))).rpartition(".")[2]
    old, new = ARGUMENTS.get(class_name, ("", ""))
    arguments = value.get("init_args") or value
    if old in arguments:
        warn(f"{old} of {class_name}", new)
        arguments[new] = arguments.pop(old)
    return value
