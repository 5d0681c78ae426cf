"""Every private part of argparse and jsonargparse that the command line relies on.

One function per trick, with the reason for it. All were checked on jsonargparse 4.53; tests/command tries each of them.
"""

import argparse
import inspect
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

from jsonargparse import DefaultHelpFormatter, _typehints

OVERRIDDEN: Mapping[type, tuple[str, ...]] = {
    # It prints defaults as Python does, and types with their modules.
    DefaultHelpFormatter: ("_expand_help",),
}
"""Private methods that classes of this package replace."""

LOGGERS = {
    "TensorBoardLogger": "grpo_lightning.training.board.Board",
    "CSVLogger": "grpo_lightning.training.board.RunCSVLogger",
}


def options_of(parser: argparse.ArgumentParser, subcommand: str = "") -> list[Any]:
    """The options of a parser, or of one of its subcommands, without those that show help or read files."""
    if subcommand:
        parser = subparsers_of(parser)[subcommand]
    return [action for action in parser._actions if hasattr(action, "_typehint") and ".help" not in action.dest]


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's subcommands."""
    return {
        name: other
        for action in parser._actions
        if isinstance(action.choices, dict)
        for name, other in action.choices.items()
    }


def hint_of(option: Any) -> Any:
    """The type of an option, as the class that it belongs to annotates it."""
    return option._typehint


def show_last(parser: argparse.ArgumentParser, groups: Sequence[Any]) -> None:
    """Shows these groups of options last in a parser's help, in their order."""
    others = [group for group in parser._action_groups if not any(group is other for other in groups)]
    parser._action_groups = [*others, *groups]


def retitle(parser: argparse.ArgumentParser, key: str, title: str) -> None:
    """Gives the group that has the option `key` another title."""
    for group in parser._action_groups:
        if any(action.dest == key for action in group._group_actions):
            group.title = title


def take_negative_numbers(parser: argparse.ArgumentParser, pattern: re.Pattern[str]) -> None:
    """Has a parser take what `pattern` matches as a value: argparse reads `-1e-4` as a flag."""
    parser._negative_number_matcher = pattern


def rename_flags(parser: argparse.ArgumentParser, flag: str, name: str) -> None:
    """Has the help of a parser show `name` where its flags begin with `flag`, which lacks the keys around."""
    for action in parser._actions:
        action.option_strings = [re.sub(f"^{re.escape(flag)}(?=[.]|$)", name, text) for text in action.option_strings]


def class_being_imported(error: BaseException) -> str | None:
    """The import path that jsonargparse was importing when `error` was raised: its message does not say it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "import_object"]
    return str(frames[-1].f_locals["name"]) if frames else None


def class_being_made(error: BaseException) -> str | None:
    """The class whose arguments were refused by `error`: the first whose `__init__` had begun."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "__init__"]
    made = [frame.f_locals["self"] for frame in frames if "self" in frame.f_locals]
    return type(made[0]).__name__ if made else None


@contextmanager
def replacing() -> Iterator[None]:
    """Inside, another class begins with its own defaults, and another list with nothing of the one before.

    jsonargparse would hand the old class's arguments to the new one where it has arguments of these names: `CISPO`
    would get the bounds of `Clipped`. It does the same to the classes of a list, by their position. And a list of
    classes takes the name of one, which is a list then: `--model.rewards FunctionReward`.

    The short names of two loggers stand for this package's, which know the folder of the run.
    """
    adapt, discard = _typehints.adapt_typehints, _typehints.discard_init_args_on_class_path_change
    resolve = _typehints.resolve_class_path_by_name

    def start_anew(parser_or_action: Any, previous: Any, value: Any) -> None:
        if previous and "init_args" in previous and previous["class_path"] != value["class_path"]:
            previous["init_args"] = type(previous["init_args"])()

    def adapt_anew(value: Any, hint: Any, *args: Any, **kwargs: Any) -> Any:
        if get_origin(hint) is list and names_one_of(get_args(hint)[0], value):
            value = [value]
        if isinstance(value, list) and not kwargs.get("append"):
            kwargs["prev_val"] = None
        return adapt(value, hint, *args, **kwargs)

    _typehints.discard_init_args_on_class_path_change = start_anew
    _typehints.adapt_typehints = adapt_anew  # type: ignore[assignment]
    _typehints.resolve_class_path_by_name = lambda cls, name: resolve(cls, LOGGERS.get(name, name))
    try:
        yield
    finally:
        _typehints.discard_init_args_on_class_path_change = discard
        _typehints.adapt_typehints = adapt
        _typehints.resolve_class_path_by_name = resolve


def names_one_of(family: Any, value: Any) -> bool:
    """Whether a value names a class, where the elements of a list are of this family of classes."""
    name = value.get("class_path") if isinstance(value, dict) else value
    is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][\w.]*", name) and not Path(name).exists()
    return bool(is_name and inspect.isclass(family) and family.__module__ != "builtins")
