"""The parser of the command line: its help in the order of use, and its errors as one line."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

from grpo_lightning.command.imports import import_mistake
from grpo_lightning.command.mistakes import OptionError, explain
from grpo_lightning.training import internals
from grpo_lightning.types import UsageError

SECTIONS = ("model", "data", "loop", "checkpoint")
"""The sections that `--help` shows first. Others follow; Lightning's trainer is last."""


class HelpFormatter(DefaultHelpFormatter):
    """Help without import paths where a name is enough, and without Python's own way to write objects."""

    def _expand_help(self, action: argparse.Action) -> str:
        return readable(super()._expand_help(action))


def readable(text: str) -> str:
    """Help text with classes by their names, and the defaults of class options as in YAML."""
    text = re.sub(r"<class '([^']*)'>", r"\1", text)
    text = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1", text)
    text = re.sub(r"default: \{'class_path': '([\w.]+)'(?:, 'init_args': (\{.*?\}))?\}", given_class, text)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z]\w*)", "", text)
    return text.replace(", known subclasses: ", "; there are: ").replace("Optional[", "null or [")


def given_class(found: re.Match[str]) -> str:
    """A default that is a class, as `Name` or `Name {lr: 1e-06}`."""
    arguments = re.sub(r"'(\w+)': ", r"\1: ", found[2]) if found[2] else ""
    return f"default: {found[1]} {arguments}".rstrip()


class Parser(LightningArgumentParser):
    """A parser that explains each mistake in one line, and shows what a user needs first.

    jsonargparse makes one more for each class that is named in the options.
    """

    owner: type | None = None
    """The class whose arguments this parser reads; None for a command's options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)

    reading: str = ""
    """The configuration that is being read."""

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Adds the arguments of a class."""
        if nested_key is None:
            self.owner = theclass
        return super().add_class_arguments(theclass, nested_key, *args, **kwargs)

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads a configuration."""
        self.reading = str(cfg_path)
        return super().parse_path(cfg_path, *args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Reads options; an exception of a module of the user's is their mistake."""
        try:
            return super().parse_args(args, *others, **kwargs)
        except (UsageError, OptionError):
            raise
        except Exception as error:
            path = internals.class_being_imported(error)
            if path is None:
                raise
            raise UsageError(f"{path}: {import_mistake(path, [])}") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises the mistake behind jsonargparse's message."""
        mistake = explain(self, message, ex)
        if self.exit_on_error:
            raise UsageError(str(mistake)) from ex
        raise mistake from ex

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help: short usage, then the sections in the order of use."""
        self.usage = usage_of(self.prog)
        named = {key: group for key, group in (self.groups or {}).items() if "." not in key}
        nested = {key: group for key, group in (self.groups or {}).items() if "." in key}
        order = [*SECTIONS, *(key for key in named if key not in (*SECTIONS, "trainer")), "trainer"]
        shown = [
            group
            for key in order
            if key in named
            for group in (named[key], *(nested[inner] for inner in nested if inner.startswith(f"{key}.")))
        ]
        internals.groups_in_order(self, shown)
        return super().format_help(*args, **kwargs)

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: an error message says what to do."""


def usage_of(prog: str) -> str:
    """One line, whatever the number of options."""
    words = prog.replace("__main__.py", "grpo").replace("[options] ", "")
    return f"{words} [--config FILE ...] [--KEY VALUE ...]"


