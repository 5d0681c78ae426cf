"""Every private part of argparse and jsonargparse that the command line relies on.

One function per trick, with the reason for it. All were checked on jsonargparse 4.53; tests/command tries each of them.
"""

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

from jsonargparse import _typehints

from grpo_lightning.command.overview import RENAMES, ask
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.training.internals import replaced

LOGGERS = {
    "TensorBoardLogger": "grpo_lightning.Board",
    "CSVLogger": "grpo_lightning.training.board.RunCSVLogger",
    "TrackioLogger": "grpo_lightning.TrackioLogger",
}

"""The loggers of this package, by the short name of the logger that each replaces."""

CLASS_OR_FUNCTION = re.compile(r"[A-Za-z_][\w.]*|[\w./~-]+\.py:\w+")
"""The name or import path of a class, or `file.py:name`."""


def options_of(parser: argparse.ArgumentParser, subcommand: str = "") -> list[Any]:
    """Returns the options of a parser, or of a subcommand, without options that show help or read files."""
    if subcommand:
        parser = subparsers_of(parser)[subcommand]
    return [action for action in parser._actions if hasattr(action, "_typehint") and ".help" not in action.dest]


def hints_of(parser: argparse.ArgumentParser, subcommand: str = "") -> dict[str, Any]:
    """Returns the types of these options by key, as their classes annotate them."""
    return {action.dest: action._typehint for action in options_of(parser, subcommand)}


def subparsers_of(parser: Any) -> Mapping[str, argparse.ArgumentParser]:
    """Returns the parsers of a parser's subcommands, by name."""
    return parser._subcommands_action.choices if parser._subcommands_action else {}


def take_negative_numbers(parser: argparse.ArgumentParser, pattern: re.Pattern[str]) -> None:
    """Makes a parser read what `pattern` matches as a value: argparse reads `-1e-4` as a flag."""
    parser._negative_number_matcher = pattern


@contextmanager
def replacing() -> Iterator[None]:
    """Inside, jsonargparse replaces classes, lists and names as this command line promises.

    - Another class begins with its own defaults. jsonargparse passes the old class's arguments on to a new class that
      has arguments of these names: `CISPO` would get the bounds of `Clipped`. Classes of a list get them by position.
    - A list of classes may be the name of one class: `--model.rewards FunctionReward`.
    - A second configuration adds to a dict of the first.
    - The short names of three loggers stand for this package's loggers, which know the folder of the run.
    - The import path of a function stands for a `FunctionReward` that calls it.
    - Names of earlier versions stand for the names of this version.
    """
    adapt, resolve = _typehints.adapt_typehints, _typehints.resolve_class_path_by_name

    def start_anew(parser_or_action: Any, previous: Any, value: Any) -> None:
        if previous and "init_args" in previous and previous["class_path"] != value["class_path"]:
            previous["init_args"] = type(previous["init_args"])()

    def adapt_anew(value: Any, hint: Any, *args: Any, **kwargs: Any) -> Any:
        value = ask(f"{RENAMES}:new_value", value, hint) or value
        if hint is Reward:
            value = ask("plugins.console.mistakes.import_errors:of_function", value) or value
        family = get_args(hint)[0] if get_origin(hint) is list else None
        if inspect.isclass(family) and family.__module__ != "builtins":
            name = value.get("class_path") if isinstance(value, dict) else value
            is_class = isinstance(name, str) and CLASS_OR_FUNCTION.fullmatch(name)
            if is_class and not Path(str(name)).exists():
                value = [value]
        previous = kwargs.get("prev_val")
        if get_origin(hint) is dict and isinstance(value, dict) and isinstance(previous, dict):
            value = {**previous, **value}
        if isinstance(value, list) and not kwargs.get("append"):
            kwargs["prev_val"] = None
        return adapt(value, hint, *args, **kwargs)

    def resolve_anew(family: Any, name: str) -> str:
        name = ask(f"{RENAMES}:new_class", name) or name
        return resolve(family, LOGGERS.get(name, name))

    with replaced(
        _typehints,
        discard_init_args_on_class_path_change=start_anew,
        adapt_typehints=adapt_anew,
        resolve_class_path_by_name=resolve_anew,
    ):
        yield
