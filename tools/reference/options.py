"""The options of the command line and of classes, from the parsers that `grpo` itself makes."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from jsonargparse import Namespace
from jsonargparse._typehints import type_to_str
from torch.optim import Optimizer

from grpo_lightning.cli import command_line, import_families
from grpo_lightning.command.overview import SECTIONS
from grpo_lightning.command.parser import Parser
from grpo_lightning.command.parser_internals import options_of, subparsers_of
from grpo_lightning.plugins.console.display.help import HELP_BY_OPTION, readable


class ParserIsReadyError(Exception):
    """Ends a command where its parser is complete, before it reads arguments."""


@dataclass(frozen=True)
class Option:
    """A key of the configuration, or an argument of a class."""

    key: str
    hint: Any
    """Its type, as the class annotates it."""
    default: Any
    is_required: bool
    text: str
    """What it changes, from the docstring of its class."""

    @property
    def type(self) -> str:
        """Its type as the help of the command line shows it."""
        text = re.sub(r"\bNoneType\b|\bNone\b", "null", readable(type_to_str(self.hint)))
        text = re.sub(r"Literal\[([^]]*)\]", lambda match: match[1].replace("'", "").replace(", ", " | "), text)
        return text if "[" in text else " | ".join(dict.fromkeys(text.split(" | ")))

    @property
    def default_text(self) -> str:
        """Its default as YAML writes it."""
        return as_yaml(self.default)


@cache
def parser_of(command: str) -> Any:
    """Returns the parser of a command that reads a configuration: fit, validate, test, predict or plan."""

    class ParserOnly(command_line(command)):  # type: ignore[misc]
        """The command line up to its parser."""

        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise ParserIsReadyError(parser)

    try:
        ParserOnly([command])
    except ParserIsReadyError as ready:
        return subparsers_of(ready.args[0])[command]
    raise AssertionError(command)


@cache
def options_of_command(command: str) -> tuple[Option, ...]:
    """Returns the options of such a command, in the order of its help."""
    options = [option(action) for action in options_of(parser_of(command))]
    order = ["", "model", "data", *SECTIONS, "trainer"]
    return tuple(sorted(options, key=lambda option: order.index(option.key.rpartition(".")[0].partition(".")[0])))


@cache
def options_of_class(kind: type) -> tuple[Option, ...]:
    """Returns the arguments of a class."""
    import_families()
    parser = Parser(exit_on_error=False)
    parser.add_class_arguments(kind)
    # The optimizer of a schedule is the run's.
    return tuple(option(action) for action in options_of(parser) if action._typehint is not Optimizer)


def option(action: Any) -> Option:
    """Returns the option of an argument of a parser."""
    text = HELP_BY_OPTION.get(action.dest, action.help or "")
    return Option(action.dest, action._typehint, action.default, action.required, as_markdown(text))


def as_markdown(text: str) -> str:
    """Returns a docstring's text on one line, without the roles of Sphinx that Lightning's docstrings have."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", " ".join(text.split())).replace("``", "`")
    return re.sub(r"\s*Defaults?(?: to)?:? `[^`]*`\.?", "", text)


def as_yaml(value: Any) -> str:
    """Returns a default as YAML writes it, with a class by its name."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, dict):
        if "class_path" in value:
            name = value["class_path"].rpartition(".")[2]
            return f"{name} {as_yaml(value['init_args'])}" if value.get("init_args") else name
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w{}./-]+", value) else json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return getattr(value, "__name__", type(value).__name__)


def classes_in(hint: Any) -> Iterator[type]:
    """Yields the classes in a type that a configuration can name by `class_path`, or whose arguments are keys."""
    if inspect.isclass(hint) and hint.__module__.split(".")[0] in ("grpo_lightning", "lightning", "torch"):
        yield hint
    for inner in get_args(hint):
        # The arguments of a Callable are a list. The program passes them.
        if not isinstance(inner, list):
            yield from classes_in(inner)
