"""Names of version 0.2: each still works, with one warning that says the new name."""

import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin

CLASSES = {
    "Ahead": "OneStepOffPolicy",
    "Stream": "FullyAsynchronous",
    "AllSettled": "AllConverged",
    "spread": "per_element",
}
"""The new name of a class or a function, by its old one."""

ARGUMENTS = {"Validation": "judge", "Benchmark": "judge", "LearnedReward": "labeller"}
"""The argument of each class that is called `grader` now."""

OLD_KEY = re.compile(r"(\bvalidations?\b[\w.]*)\.judge\b|\.labeller\b")
"""The keys of these arguments in options and in saved configurations."""

VALUES = {"drawn": "sampled", "moving": "has_advantage"}
"""New values of arguments that take a word of a list."""


@cache
def warn(old: str, new: str) -> None:
    """Warns once that a name has changed."""
    warnings.warn(f"{old} is called {new} now; the old name still works", FutureWarning, stacklevel=2)


def new_class(name: str) -> str:
    """Returns the short name that a class of this package has now; other names as they are."""
    prefix, _, old = name.rpartition(".")
    if prefix not in ("", "grpo_lightning") or old not in CLASSES:
        return name
    warn(old, CLASSES[old])
    return CLASSES[old]


def new_key(key: str) -> str:
    """Returns the dotted key that an option has now."""
    return OLD_KEY.sub(r"\1.grader", key)


def new_flags(words: Sequence[str]) -> list[str]:
    """Returns the options of the command line with the names that they have now."""
    renamed = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and (new_flag := new_key(flag)) != flag:
            warn(flag, new_flag)
            word = new_flag + equals + value
        renamed.append(word)
    return renamed


def new_value(value: Any, hint: Any) -> Any:
    """Returns a value of the configuration, for an argument of the type `hint`, with the names that are used now."""
    if get_origin(hint) is Literal and value not in get_args(hint) and VALUES.get(value) in get_args(hint):
        warn(value, VALUES[value])
        return VALUES[value]
    # A dict, or jsonargparse's Namespace: importing it takes longer than reading a saved configuration.
    if not hasattr(value, "get"):
        return value
    class_name = str(value.get("class_path", getattr(hint, "__name__", ""))).rpartition(".")[2]
    old = ARGUMENTS.get(class_name, "")
    arguments = value.get("init_args") or value
    if old in arguments:
        warn(f"{old} of {class_name}", "grader")
        arguments["grader"] = arguments.pop(old)
    return value
