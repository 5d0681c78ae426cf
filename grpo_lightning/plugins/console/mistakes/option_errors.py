"""Explains a mistake in the options in one line: key, value, allowed names, and the name that was probably meant."""

import argparse
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from grpo_lightning.command import parser_internals as internals
from grpo_lightning.plugins.console.mistakes import known_errors as sentences
from grpo_lightning.plugins.console.mistakes.import_errors import import_mistake, refusal
from grpo_lightning.plugins.console.mistakes.known_errors import BY_CLASS, one_line
from grpo_lightning.plugins.console.mistakes.message_internals import left_by
from grpo_lightning.types import UsageError

PLAIN: dict[Any, str] = {
    int: "a whole number (int)",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
"""Names of plain types in messages."""


class OptionError(argparse.ArgumentError):
    """A mistake in one option. A parser of a nested class raises it, and the outer parser puts its own key in front.

    Args:
        key: The option, as seen from the parser that raises: `objective.beta`.
        text: The rest of the message, which begins with `=value` or `:`.
    """

    def __init__(self, key: str, text: str) -> None:
        super().__init__(None, f"{key}{text}")
        self.key = key
        self.text = text


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, and the exceptions that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def explain(parser: Any, message: str, error: BaseException | None) -> OptionError:
    """Returns the mistake that a message of jsonargparse is about. Such a message has a line per type that it tried.

    Args:
        parser: The parser that refuses the options.
        message: Its message.
        error: The exception behind the message, if any.
    """
    key = next(iter(re.findall(r'^Parser key "([^"]+)"', message)), "")
    nested = next((cause for cause in causes(error) if isinstance(cause, OptionError)), None)
    if nested is not None:
        return OptionError(".".join(filter(None, (key, nested.key))), nested.text)
    if match := re.search(r"(?s)unrecognized arguments: (.*)|^'?Option '([^']*)' is not accepted", message):
        return unknown_key(parser, match[1] or match[2])
    if match := re.search(r"^Subcommand '(.*)' does not accept option '(.*)'", message):
        return unknown_option(internals.hints_of(parser, match[1]), match[2])
    if match := re.search(r"(?s)the following arguments are required: (.*)", message):
        return missing_keys(parser, match[1])
    if match := re.search(r'Linked "([^"]*)" must be given via "([^"]*)"', message):
        return OptionError(match[1], f": it follows from {match[2]}; set that instead")
    if match := re.search(r"^--(\S+)\.help: .*: ([\w.]+)$", message):
        return wrong_class(f"{match[1]}.help", match[2], internals.hints_of(parser).get(match[1]))
    if match := re.search(r"(?s)^(?:Unexpected|Problems parsing) config: (.*)", message):
        path = left_by(error, "_load_config_parser_mode", "path") if error else []
        return OptionError("config", f"={', '.join(map(str, path))}: no keys and values in YAML: {one_line(match[1])}")
    if key == "config":  # a file that cannot be read: it is on another machine, for instance
        return OptionError("config", f": {one_line(message.partition(':')[2])}")
    return wrong_value(parser, key, message) if key else OptionError("", one_line(message))


def unknown_key(parser: Any, text: str) -> OptionError:
    """Returns the mistake of a key or flag that is no option of the parser. `text` begins with it."""
    flag = text.split("=")[0].split()[0]
    hints = internals.hints_of(parser)
    if not flag.startswith("-") and parser.owner is None:
        return OptionError(flag, ": this is no option; options are written --KEY VALUE or --KEY=VALUE")
    if parser.owner is None:
        return unknown_option(hints, flag)
    if flag == "class_path":  # an argument of the class stands beside it instead of below init_args
        return OptionError("", f": {BY_CLASS}")
    key = flag.removeprefix("--").partition(".")[0]
    return OptionError(key, sentences.no_such_argument(key, parser.owner.__name__, [*hints]))


def unknown_option(hints: Mapping[str, Any], flag: str) -> OptionError:
    """Returns the mistake of a key that is no option of a command, nor an argument of a class that an option takes.

    Args:
        hints: Types of the command's options, by their keys.
        flag: The key; from a file it has no dashes.
    """
    nested = [f"{key}.{name}" for key, hint in hints.items() for kind in kinds_of(hint) for name in arguments_of(kind)]
    return OptionError(flag, f": there is no such option.{sentences.instead(flag, [*hints, *nested])}")


def missing_keys(parser: Any, keys: str) -> OptionError:
    """Returns the mistake of required options that are not set. `keys` lists them, separated by commas."""
    command = next((name for name in internals.subparsers_of(parser) if keys.startswith(f"{name}.")), "")
    key, *further_keys = (key.removeprefix(f"{command}.") for key in keys.split(", "))
    also = f", with {', '.join(further_keys)}" if further_keys else ""
    needs = f": not set, and {parser.owner.__name__ if parser.owner else 'the run'} needs it{also}."
    return OptionError(key, needs + there_are(internals.hints_of(parser, command).get(key)))


def wrong_value(parser: Any, key: str, message: str) -> OptionError:
    """Returns the mistake of a value that is not of the option's type."""
    hint = internals.hints_of(parser).get(key)

    # Which value did the message refuse?
    pattern = r"Given value: (.*?)(?:\. Got value: .*)?\Z|Got value: (.*?)(?:\nSubclass types.*)?\Z"
    if nested := re.search(r"NestedArg\(key='([^']*)', val='(.*?)'\)", message):
        key = f"{key}.{nested[1]}"
        value = nested[2]
    else:
        match = re.search(f"{pattern}|Expected a path but (.*) either", message, re.DOTALL)
        value = one_line(next(filter(None, match.groups()), "")) if match else "?"

    # A class is expected.
    if families := families_in(hint):
        if class_name := class_named(message, value):
            return wrong_class(key, class_name, hint)
        names = " or ".join(family.__name__ for family in families)
        argument = next(iter(arguments_of(families[0])), "")
        alone = f", or its arguments alone: {{{argument}: {value}}}" if argument else ""
        return OptionError(key, f"={value}: expected {names}; {BY_CLASS}{alone}.{there_are(hint)}")

    words = words_of(hint)
    close = sentences.did_you_mean(value, [word for word in words if word not in PLAIN.values()])
    return OptionError(key, f"={value}: expected {' or '.join(words)}{close and f'.{close}'}")


def wrong_class(key: str, name: str, hint: Any) -> OptionError:
    """Returns the mistake of a name or import path that names no class which the option takes."""
    families = families_in(hint)
    if "." in name:
        return OptionError(key, f"={name}: {import_mistake(name, families)}")
    names = " or ".join(family.__name__ for family in families)
    return OptionError(key, f"={name}: there is no such {names}.{there_are(hint, name)}")


def class_named(message: str, value: str) -> str:
    """Returns the name or import path of the class in a refused value; empty if the value names no class."""
    patterns = (
        r"Problem with given class_path '([^']+)'",
        r"(?:Expected a dot import path string:|Unexpected import path format:) (\S+)",
        r"Import path (\S+) does not",
        r"'?class_path'?[:=] ?'([^']+)'",
    )
    name = next((match[1] for pattern in patterns if (match := re.search(pattern, message))), value)
    return name if re.fullmatch(r"[A-Za-z_][\w.]*", name) else ""


def families_in(hint: Any) -> list[type]:
    """Returns the base classes in a type hint, also inside lists and as results of callables; none for plain types."""
    origin = get_origin(hint)
    members = get_args(hint)
    if str(origin).endswith("Callable'>"):
        return families_in(members[1])
    if origin is not None and origin not in (Literal, dict):
        return list(dict.fromkeys(family for member in members for family in families_in(member)))
    return [hint] if inspect.isclass(hint) and hint.__module__ not in ("builtins", "pathlib", "torch") else []


def kinds_of(hint: Any) -> list[type]:
    """Returns the classes that a type hint allows: all that derive from a base class, or else the base class."""
    return [kind for family in families_in(hint) for kind in members_of(family) or [family]]


def there_are(hint: Any, name: str = "") -> str:
    """Returns a sentence with the classes that a type hint allows, and the class whose name is nearest to `name`."""
    return sentences.among([kind.__name__ for kind in kinds_of(hint)], name)


def arguments_of(kind: Any) -> list[str]:
    """Returns the names of a class's arguments."""
    names = inspect.signature(kind.__init__).parameters  # the `__init__` of a builtin has *args and **kwargs alone
    return [name for name in names if name not in ("self", "args", "kwargs")]


def members_of(family: type) -> list[type]:
    """Returns the public classes that derive from `family` and can be made."""
    hidden = re.compile(r"accelerate\.|.*(<locals>|\._)")
    children: list[type] = family.__subclasses__()
    derived = [member for child in children for member in (child, *members_of(child))]
    named = [member for member in derived if not hidden.match(f"{member.__module__}:.{member.__qualname__}")]
    return [member for member in named if not inspect.isabstract(member)]


def words_of(hint: Any) -> list[str]:
    """Returns the values that a type accepts: a phrase per type of a union, or its choices."""
    origin = get_origin(hint)
    members = get_args(hint)
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(word for member in members for word in words_of(member)))
    if origin is Literal:
        return [str(choice) for choice in members]
    return [PLAIN.get(hint, "a list" if origin is list else getattr(hint, "__name__", str(hint)))]


def refused_argument(error: BaseException) -> UsageError:
    """Returns the mistake behind an exception while an object was made from the options: the innermost cause."""
    *_, innermost = causes(error)
    owner = "".join(f"{type(instance).__name__}: " for instance in left_by(innermost, "__init__", "self")[:1])
    return UsageError(f"{owner}{one_line(refusal(innermost), 300)}")
