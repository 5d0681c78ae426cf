"""Every private part of argparse and jsonargparse that the command line relies on.

One function per trick, with the reason for it. All were checked on jsonargparse 4.53; tests/command tries each of them.
"""

import argparse
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jsonargparse import DefaultHelpFormatter, _typehints

OVERRIDDEN: Mapping[type, tuple[str, ...]] = {
    # It prints defaults as Python does, and types with their modules.
    DefaultHelpFormatter: ("_expand_help",),
}
"""Private methods that classes of this package replace."""


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
    would get the bounds of `Clipped`. It does the same to the classes of a list, by their position.
    """
    adapt, discard = _typehints.adapt_typehints, _typehints.discard_init_args_on_class_path_change

    def start_anew(parser_or_action: Any, previous: Any, value: Any) -> None:
        if previous and "init_args" in previous and previous["class_path"] != value["class_path"]:
            previous["init_args"] = type(previous["init_args"])()

    def adapt_anew(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, list) and not kwargs.get("append"):
            kwargs["prev_val"] = None
        return adapt(value, *args, **kwargs)

    _typehints.discard_init_args_on_class_path_change = start_anew
    _typehints.adapt_typehints = adapt_anew  # type: ignore[assignment]
    try:
        yield
    finally:
        _typehints.discard_init_args_on_class_path_change = discard
        _typehints.adapt_typehints = adapt
