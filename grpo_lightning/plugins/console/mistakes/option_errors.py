"""A mistake in the options as one line: the key, the value, what there is, and the nearest name."""

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
"""What a plain type is called in a message."""


class OptionError(argparse.ArgumentError):
    """A mistake in one option, as the parser of a nested class hands it to the one around it.

    `key` is the option from this parser on: `objective.beta`; `rest` follows it, with `=value` or `:` in front.
    """

    def __init__(self, key: str, rest: str) -> None:
        super().__init__(None, f"{key}{rest}")
        self.key, self.rest = key, rest


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def explain(parser: Any, message: str, error: BaseException | None) -> OptionError:
    """The mistake behind the message with which a parser of jsonargparse refuses: a line per type that was tried."""
    key = next(iter(re.findall(r'^Parser key "([^"]+)"', message)), "")
    below = next((cause for cause in causes(error) if isinstance(cause, OptionError)), None)
    if below is not None:
        return OptionError(".".join(filter(None, (key, below.key))), below.rest)
    if found := re.search(r"(?s)unrecognized arguments: (.*)|^'?Option '([^']*)' is not accepted", message):
        return unknown_key(parser, found[1] or found[2])
    if found := re.search(r"^Subcommand '(.*)' does not accept option '(.*)'", message):
        return unknown_option(internals.hints_of(parser, found[1]), found[2])
    if found := re.search(r"(?s)the following arguments are required: (.*)", message):
        return missing_keys(parser, found[1])
    if found := re.search(r'Linked "([^"]*)" must be given via "([^"]*)"', message):
        return OptionError(found[1], f": it follows from {found[2]}; set that instead")
    if found := re.search(r"^--(\S+)\.help: .*: ([\w.]+)$", message):
        return wrong_class(f"{found[1]}.help", found[2], internals.hints_of(parser).get(found[1]))
    if found := re.search(r"(?s)^(?:Unexpected|Problems parsing) config: (.*)", message):
        path = left_by(error, "_load_config_parser_mode", "path") if error else []
        return OptionError("config", f"={', '.join(map(str, path))}: no keys and values in YAML: {one_line(found[1])}")
    if key == "config":  # one on another machine, for instance
        return OptionError("config", f": {one_line(message.partition(':')[2])}")
    return wrong_value(parser, key, message) if key else OptionError("", one_line(message))


def unknown_key(parser: Any, given: str) -> OptionError:
    """A key or flag that no option of a parser has."""
    flag, hints = given.split("=")[0].split()[0], internals.hints_of(parser)
    if not flag.startswith("-") and parser.owner is None:
        return OptionError(flag, ": this is no option; options are written --KEY VALUE or --KEY=VALUE")
    if parser.owner is None:
        return unknown_option(hints, flag)
    if flag == "class_path":  # beside it stands what belongs below
        return OptionError("", f": {BY_CLASS}")
    key = flag.removeprefix("--").partition(".")[0]
    return OptionError(key, sentences.no_such_argument(key, parser.owner.__name__, [*hints]))


def unknown_option(hints: Mapping[str, Any], flag: str) -> OptionError:
    """A key that no option of a command has, nor any class that the options take; in a file it has no dashes."""
    taken = [f"{key}.{name}" for key, hint in hints.items() for kind in kinds_of(hint) for name in arguments_of(kind)]
    return OptionError(flag, f": there is no such option.{sentences.instead(flag, [*hints, *taken])}")


def missing_keys(parser: Any, keys: str) -> OptionError:
    """Options that must be given."""
    command = next((name for name in internals.subparsers_of(parser) if keys.startswith(f"{name}.")), "")
    first, *others = (key.removeprefix(f"{command}.") for key in keys.split(", "))
    also = f", with {', '.join(others)}" if others else ""
    needs = f": not set, and {parser.owner.__name__ if parser.owner else 'the run'} needs it{also}."
    return OptionError(first, needs + there_are(internals.hints_of(parser, command).get(first)))


def wrong_value(parser: Any, key: str, message: str) -> OptionError:
    """A value that is not of the option's type."""
    hint = internals.hints_of(parser).get(key)
    given = r"Given value: (.*?)(?:\. Got value: .*)?\Z|Got value: (.*?)(?:\nSubclass types.*)?\Z"
    if nested := re.search(r"NestedArg\(key='([^']*)', val='(.*?)'\)", message):
        key, value = f"{key}.{nested[1]}", nested[2]
    else:
        found = re.search(f"{given}|Expected a path but (.*) either", message, re.DOTALL)
        value = one_line(next(filter(None, found.groups()), "")) if found else "?"
    if families := families_in(hint):
        if named := class_named(message, value):
            return wrong_class(key, named, hint)
        names, first = " or ".join(family.__name__ for family in families), next(iter(arguments_of(families[0])), "")
        alone = f", or its arguments alone: {{{first}: {value}}}" if first else ""
        return OptionError(key, f"={value}: expected {names}; {BY_CLASS}{alone}.{there_are(hint)}")
    words = words_of(hint)
    close = sentences.did_you_mean(value, [word for word in words if word not in PLAIN.values()])
    return OptionError(key, f"={value}: expected {' or '.join(words)}{close and f'.{close}'}")


def wrong_class(key: str, name: str, hint: Any) -> OptionError:
    """A name or import path of no class that an option takes."""
    families = families_in(hint)
    if "." in name:
        return OptionError(key, f"={name}: {import_mistake(name, families)}")
    names = " or ".join(family.__name__ for family in families)
    return OptionError(key, f"={name}: there is no such {names}.{there_are(hint, name)}")


def class_named(message: str, value: str) -> str:
    """The name or import path that was given for a class; empty if the value is none."""
    patterns = (
        r"Problem with given class_path '([^']+)'",
        r"(?:Expected a dot import path string:|Unexpected import path format:) (\S+)",
        r"Import path (\S+) does not",
        r"'?class_path'?[:=] ?'([^']+)'",
    )
    found = next((found[1] for pattern in patterns if (found := re.search(pattern, message))), value)
    return found if re.fullmatch(r"[A-Za-z_][\w.]*", found) else ""


def families_in(hint: Any) -> list[type]:
    """The base classes in a type, also in lists and as what a factory returns. Plain types, and dicts, are none."""
    origin, parts = get_origin(hint), get_args(hint)
    if str(origin).endswith("Callable'>"):
        return families_in(parts[1])
    if origin is not None and origin not in (Literal, dict):
        return list(dict.fromkeys(family for part in parts for family in families_in(part)))
    return [hint] if inspect.isclass(hint) and hint.__module__ not in ("builtins", "pathlib", "torch") else []


def kinds_of(hint: Any) -> list[type]:
    """The classes that a type allows: of each family those that derive from it, or itself."""
    return [kind for family in families_in(hint) for kind in members_of(family) or [family]]


def there_are(hint: Any, given: str = "") -> str:
    """The classes that a type allows, with the one nearest to what was given."""
    return sentences.among([kind.__name__ for kind in kinds_of(hint)], given)


def arguments_of(kind: Any) -> list[str]:
    """The names of a class's arguments."""
    names = inspect.signature(kind.__init__).parameters  # a builtin has none of its own
    return [name for name in names if name not in ("self", "args", "kwargs")]


def members_of(family: type) -> list[type]:
    """The public classes that derive from `family` and can be made."""
    hidden = re.compile(r"accelerate\.|.*(<locals>|\._)")
    children: list[type] = family.__subclasses__()
    derived = [member for child in children for member in (child, *members_of(child))]
    named = [member for member in derived if not hidden.match(f"{member.__module__}:.{member.__qualname__}")]
    return [member for member in named if not inspect.isabstract(member)]


def words_of(hint: Any) -> list[str]:
    """What a type accepts: one phrase per type of a union, or its choices."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(word for part in parts for word in words_of(part)))
    if origin is Literal:
        return [str(choice) for choice in parts]
    return [PLAIN.get(hint, "a list" if origin is list else getattr(hint, "__name__", str(hint)))]


def refused_argument(error: BaseException) -> UsageError:
    """The mistake behind an exception of a class that is made from the options: what the innermost one says."""
    *_, innermost = causes(error)
    owner = "".join(f"{type(made).__name__}: " for made in left_by(innermost, "__init__", "self")[:1])
    return UsageError(f"{owner}{one_line(refusal(innermost), 300)}")
