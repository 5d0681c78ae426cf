"""A mistake in the options as one line: the key, the value, what there is, and the nearest name."""

import argparse
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

from grpo_lightning.command import internals
from grpo_lightning.command.imports import import_mistake, refusal
from grpo_lightning.command.sentences import BY_CLASS, did_you_mean, no_such_argument, no_such_class, one_line
from grpo_lightning.command.sentences import there_are as listed
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

    Args:
        key: The option, from this parser on: `objective.beta`.
        rest: What follows the key in the message, with `=value` or `:` in front.
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
    """The mistake behind jsonargparse's message.

    Args:
        parser: The parser that refuses.
        message: What jsonargparse writes: several lines, one per type that was tried.
        error: The exception behind the message.
    """
    key = next(iter(re.findall(r'^Parser key "([^"]+)"', message)), "")
    below = next((cause for cause in causes(error) if isinstance(cause, OptionError)), None)
    if below is not None:
        return OptionError(f"{key}.{below.key}" if key else below.key, below.rest)
    for pattern, mistake in PATTERNS.items():
        if found := re.search(pattern, message):
            return mistake(parser, error, *found.groups())
    if key:
        return wrong_value(parser, key, message)
    return OptionError("", one_line(message))


def unknown_key(parser: Any, error: BaseException | None, given: str) -> OptionError:
    """A key or flag that no option has. `command.early` knows those of a command; these are of others' classes."""
    flag = given.split("=")[0].split()[0]
    if parser.owner is None:
        return OptionError(flag, ": there is no such option")
    key = flag.removeprefix("--").partition(".")[0]
    return OptionError(key, no_such_argument(key, parser.owner.__name__, keys_of(parser)))


def missing_keys(parser: Any, error: BaseException | None, keys: str) -> OptionError:
    """Options that must be given."""
    command = next((name for name in internals.subparsers_of(parser) if keys.startswith(f"{name}.")), "")
    first, *others = (key.removeprefix(f"{command}.") for key in keys.split(", "))
    also = f"; so {'is' if len(others) == 1 else 'are'} {', '.join(others)}" if others else ""
    whose = f"{parser.owner.__name__} needs it" if parser.owner is not None else "it is needed"
    there = there_are(type_of(parser, first, command))
    return OptionError(first, f": not set, and {whose}{also}{f'.{there}' if there else ''}")


def two_sources(parser: Any, error: BaseException | None, target: str, source: str) -> OptionError:
    """An option that follows from another one, and was given."""
    return OptionError(target, f": it follows from {source}; set that instead")


def no_help(parser: Any, error: BaseException | None, flag: str, name: str) -> OptionError:
    """A class that has no help, since it is not there."""
    return wrong_class(f"{flag}.help", name, type_of(parser, flag))


def no_configuration(parser: Any, error: BaseException | None, problem: str) -> OptionError:
    """A configuration that cannot be read, such as one on another machine."""
    return OptionError("config", f": {one_line(problem)}")


PATTERNS: dict[str, Callable[..., OptionError]] = {
    r"(?s)unrecognized arguments: (.*)": unknown_key,
    r"(?s)^'?(?:Subcommand|Group) '[^']*' does not accept option '([^']*)'": unknown_key,
    r"(?s)^'?Option '([^']*)' is not accepted": unknown_key,
    r"(?s)the following arguments are required: (.*)": missing_keys,
    r'Linked "([^"]*)" must be given via "([^"]*)"': two_sources,
    r"^--(\S+)\.help: .*: ([\w.]+)$": no_help,
    r'(?s)^Parser key "config":(.*)': no_configuration,
}
"""What jsonargparse writes, beside wrong values, and who explains it."""


def wrong_value(parser: Any, key: str, message: str) -> OptionError:
    """A value that is not of the option's type."""
    hint = type_of(parser, key)
    families = families_in(hint)
    key, value = key_and_value(key, message)
    if not families:
        close = nearest_choice(value, hint)
        return OptionError(key, f"={value}: expected {described(hint)}{f'.{close}' if close else ''}")
    if named := class_named(message, value):
        return wrong_class(key, named, hint)
    return OptionError(key, f"={value}: expected {described(hint)}; {BY_CLASS}.{there_are(hint)}")


def wrong_class(key: str, name: str, hint: Any) -> OptionError:
    """A name or import path of no class that an option takes."""
    families = families_in(hint)
    if "." in name:
        return OptionError(key, f"={name}: {import_mistake(name, families)}")
    return OptionError(key, no_such_class(name, [f.__name__ for f in families], classes_of(families)))


def key_and_value(key: str, message: str) -> tuple[str, str]:
    """The key, with what a flag adds to it, and the value, as far as the message shows it."""
    nested = re.search(r"NestedArg\(key='([^']*)', val='(.*?)'\)", message)
    if nested:
        return f"{key}.{nested[1]}", nested[2]
    for pattern in (
        r"Given value: (.*?)(?:\. Got value: .*)?\Z",
        r"Got value: (.*?)(?:\nSubclass types.*)?\Z",
        r"Expected a path but (.*) either",
    ):
        if found := re.search(pattern, message, re.DOTALL):
            return key, one_line(found[1])
    return key, "?"


def class_named(message: str, value: str) -> str:
    """The name or import path that was given for a class; empty if the value is none."""
    patterns = (
        r"Problem with given class_path '([^']+)'",
        r"Expected a dot import path string: (\S+)",
        r"Unexpected import path format: (\S+)",
        r"Import path (\S+) does not",
        r"'?class_path'?[:=] ?'([^']+)'",
    )
    found = next((found[1] for pattern in patterns if (found := re.search(pattern, message))), value)
    return found if re.fullmatch(r"[\w.]+", found) else ""


def families_in(hint: Any) -> list[type]:
    """The base classes in a type, also in lists and as what a factory returns. Plain types are none."""
    origin = get_origin(hint)
    if origin is Callable or str(origin) == "<class 'collections.abc.Callable'>":
        return families_in(get_args(hint)[1])
    if origin in (Union, types.UnionType) or (origin is not None and origin is not Literal):
        found = [family for part in get_args(hint) for family in families_in(part)]
        return list(dict.fromkeys(found))
    return [hint] if inspect.isclass(hint) and hint.__module__ not in ("builtins", "pathlib", "torch") else []


def classes_of(families: Iterable[type]) -> list[str]:
    """The names of the classes that can be made, of these families."""
    found = [member for family in families for member in members_of(family) or [family]]
    return list(dict.fromkeys(member.__name__ for member in found))


def members_of(family: type) -> list[type]:
    """The public classes that derive from `family` and can be made."""
    children: list[type] = family.__subclasses__()
    derived = [member for child in children for member in (child, *members_of(child))]
    hidden = [c for c in derived if c.__name__.startswith("_") or "<locals>" in c.__qualname__ or inspect.isabstract(c)]
    return [member for member in derived if member not in hidden and not member.__module__.startswith("accelerate.")]


def described(hint: Any) -> str:
    """What a type accepts, in words."""
    *first, last = dict.fromkeys(words_of(hint))
    return f"{', '.join(first)} or {last}" if first else last


def words_of(hint: Any) -> Iterator[str]:
    """One phrase per type of a union."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for part in get_args(hint):
            yield from words_of(part)
    elif origin is Literal:
        yield from (str(choice) for choice in get_args(hint))
    elif families := families_in(hint):
        names = " or ".join(family.__name__ for family in families)
        yield f"a list of {names}" if origin in (list, tuple) else f"a {names}"
    else:
        yield PLAIN.get(hint, "a list" if origin is list else getattr(hint, "__name__", str(hint)))


def nearest_choice(value: str, hint: Any) -> str:
    """The nearest of the choices of a type that has some."""
    return did_you_mean(value, [word for word in words_of(hint) if word not in PLAIN.values()])


def there_are(hint: Any) -> str:
    """The classes that a type allows."""
    return listed(classes_of(families_in(hint)))


def type_of(parser: Any, key: str, subcommand: str = "") -> Any:
    """The type of an option; None if there is no such option."""
    found = (option for option in internals.options_of(parser, subcommand) if option.dest == key)
    return next((internals.hint_of(option) for option in found), None)


def keys_of(parser: Any) -> list[str]:
    """The keys of a parser's options."""
    return [action.dest for action in internals.options_of(parser)]


def refused_argument(error: BaseException) -> UsageError:
    """The mistake behind an exception of a class that is made from the options: what the innermost one says."""
    *_, innermost = causes(error)
    name = internals.class_being_made(innermost)
    return UsageError(f"{f'{name}: ' if name else ''}{one_line(refusal(innermost), 300)}")
