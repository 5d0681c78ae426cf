"""A mistake in the options as one line: the key, the value, what there is, and the nearest name."""

import argparse
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from grpo_lightning.command import internals
from grpo_lightning.command.imports import import_mistake, refusal
from grpo_lightning.types import UsageError

MOST_NAMES = 20
"""The number of names from which a message lists the nearest alone."""

PLAIN: dict[Any, str] = {
    int: "a whole number (int)",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
"""What a plain type is called in a message."""

BY_CLASS = "a class is given as {class_path: NAME, init_args: {KEY: VALUE}}"


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


def unknown_key(parser: Any, error: BaseException | None, key: str, owner: str | None = None) -> OptionError:
    """A key that no option has. The keys that there are belong to `parser`, or to that of a subcommand."""
    parser = getattr(error, "subcommand_parser", parser)
    if parser.owner is not None:
        names = keys_of(parser)
        if key.partition(".")[0] in ("init_arg", "init_args", "class", "class_paths", "args", "name", "type"):
            return OptionError(key.partition(".")[0], f": {parser.owner.__name__} has no such option; {BY_CLASS}")
        there = f" There {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if names else " It has none"
        return OptionError(key, f": {parser.owner.__name__} has no such option.{did_you_mean(key, names)}{there}")
    key = f"{owner}.{key}" if owner else key
    return OptionError(key, f": there is no such option.{did_you_mean_key(parser, key)}")


def unknown_group_key(parser: Any, error: BaseException | None, owner: str, key: str) -> OptionError:
    """A key that a section does not have."""
    return unknown_key(parser, error, key, owner)


def unknown_flag(parser: Any, error: BaseException | None, given: str) -> OptionError:
    """A flag that no option has, or a word that is no flag."""
    flag = given.split("=")[0].split()[0]
    if parser.owner is not None:
        return unknown_key(parser, error, flag.removeprefix("--"))
    if not flag.startswith("--"):
        return OptionError(flag, ": this is no option; options are written --KEY VALUE or --KEY=VALUE")
    return OptionError(flag, f": there is no such option.{did_you_mean_key(parser, flag.removeprefix('--'), '--')}")


def missing_keys(parser: Any, error: BaseException | None, keys: str) -> OptionError:
    """Options that must be given."""
    command = next((name for name in internals.subparsers_of(parser) if keys.startswith(f"{name}.")), "")
    first, *others = (key.removeprefix(f"{command}.") for key in keys.split(", "))
    also = f"; so {'is' if len(others) == 1 else 'are'} {', '.join(others)}" if others else ""
    whose = f"{parser.owner.__name__} needs it" if parser.owner is not None else "it is needed"
    there = there_are(type_of(parser, first, command))
    return OptionError(first, f": not set, and {whose}{also}{f'.{there}' if there else ''}")


def no_such_file(parser: Any, error: BaseException | None, key: str, path: str) -> OptionError:
    """A configuration that is not there."""
    return OptionError(key, f"={as_given(path)}: there is no such file")


def bad_file(parser: Any, error: BaseException | None, problem: str) -> OptionError:
    """A configuration that is not YAML."""
    where = re.sub(r'in "<[^"]*>", ', "", one_line(problem))
    return OptionError("config", f"={as_given(parser.reading)}: this is no YAML: {where}")


def no_mapping(parser: Any, error: BaseException | None, content: str) -> OptionError:
    """A configuration without keys."""
    expected = "expected keys and values, such as `loop: {mu: 2}`"
    return OptionError("config", f"={as_given(parser.reading)}: {expected}. It begins with: {one_line(content, 60)}")


def as_given(path: str) -> str:
    """A path as a user in this folder would write it."""
    here = f"{Path.cwd()}/"
    return path.strip("'\"").removeprefix(here)


def two_sources(parser: Any, error: BaseException | None, source: str, target: str) -> OptionError:
    """An option that follows from another one, and was given."""
    return OptionError(target, f": it follows from {source}; set that instead")


PATTERNS: dict[str, Callable[..., OptionError]] = {
    r"(?s)unrecognized arguments: (.*)": unknown_flag,
    r"(?s)^'?Subcommand '[^']*' does not accept option '([^']*)'": unknown_key,
    r"(?s)^'?Group '([^']*)' does not accept option '([^']*)'": unknown_group_key,
    r"(?s)^'?Option '([^']*)' is not accepted": unknown_key,
    r"(?s)the following arguments are required: (.*)": missing_keys,
    r'(?s)^Parser key "(config)":.*?(?:Path|File|file)\b.*?not [^:]*: (\S+)': no_such_file,
    r"(?s)Problems parsing config: (.*)": bad_file,
    r"(?s)Unexpected config: (.*)": no_mapping,
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
    wanted = " or ".join(family.__name__ for family in families)
    if named := class_named(message, value):
        if "." in named:
            return OptionError(key, f"={named}: {import_mistake(named, families)}")
        return OptionError(key, f"={named}: there is no such {wanted}.{there_are(hint, named)}")
    return OptionError(key, f"={value}: expected {described(hint)}; {BY_CLASS}.{there_are(hint)}")


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


def there_are(hint: Any, given: str = "") -> str:
    """The classes that a type allows, with the one nearest to what was given."""
    names = classes_of(families_in(hint))
    if not names:
        return ""
    listed = names if len(names) <= MOST_NAMES else nearest(given, names, 8, 0.0)
    among = "There is" if len(names) == 1 else "There are" if listed == names else "Among others there are"
    return f"{did_you_mean(given, names)} {among} {', '.join(listed)}"


def type_of(parser: Any, key: str, subcommand: str = "") -> Any:
    """The type of an option; None if there is no such option."""
    found = (option for option in internals.options_of(parser, subcommand) if option.dest == key)
    return next((internals.hint_of(option) for option in found), None)


def keys_of(parser: Any) -> list[str]:
    """The keys of a parser's options."""
    return [action.dest for action in internals.options_of(parser)]


def did_you_mean_key(parser: Any, key: str, dashes: str = "") -> str:
    """The option that is nearest to `key`: spelled alike, or of the same name in another section."""
    names = keys_of(parser)
    sections = [*dict.fromkeys(name.partition(".")[0] for name in names if "." in name)]
    parts = [f"{action.dest}.{part}" for action in internals.options_of(parser) for part in parts_of(action)]
    leaf = key.rpartition(".")[2]
    same = [name for name in [*names, *parts] if name.rpartition(".")[2] == leaf]
    if close := same or nearest(key, names if "." in key else [*sections, *names]) or nearest(key, parts):
        return f" Did you mean {dashes}{close[0]}?"
    return f" The sections are {', '.join(sections)}; --help lists their options"


def parts_of(action: Any) -> list[str]:
    """The arguments of the classes that an option takes."""
    own = [
        family for family in families_in(internals.hint_of(action)) if family.__module__.startswith("grpo_lightning")
    ]
    found = [
        name for family in own for part in (family, *members_of(family)) for name in inspect.signature(part).parameters
    ]
    return list(dict.fromkeys(name for name in found if name not in ("args", "kwargs")))


def did_you_mean(given: str, names: Sequence[str]) -> str:
    """` Did you mean NAME?` with the nearest of `names`; empty if none is near."""
    close = nearest(given, names)
    return f" Did you mean {close[0]}?" if close else ""


def nearest(given: str, names: Sequence[str], number: int = 1, cutoff: float = 0.5) -> list[str]:
    """The names nearest to what was given, whatever their case; those that begin with it are nearest."""
    if not given:
        return list(names)[:number] if not cutoff else []
    lower = {name.lower(): name for name in reversed(names)}
    begin = [name for name in names if name.lower().startswith(given.lower()) and len(given) > 2]
    close = [lower[name] for name in get_close_matches(given.lower(), lower, number, cutoff)]
    return list(dict.fromkeys([*begin, *close]))[:number]


def refused_argument(error: BaseException) -> UsageError:
    """The mistake behind an exception of a class that is made from the options: what the innermost one says."""
    *_, innermost = causes(error)
    name = internals.class_being_made(innermost)
    return UsageError(f"{f'{name}: ' if name else ''}{one_line(refusal(innermost), 300)}")


def one_line(text: str, most: int = 200) -> str:
    """The text without line breaks, cut after `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 4]} ..."
