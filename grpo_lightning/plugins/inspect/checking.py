"""Checks the rows of a file of records by the fields that they become, before anything is made of them."""

import base64
import binascii
import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Union, get_args, get_origin

MOST = 2**31
"""No whole number of a record is as large."""
PLAIN = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", type(None): "null"}


def parsed(line: str) -> Any:
    """A line's JSON.

    Raises:
        ValueError: It is none, has NaN or an infinity, or is nested too deeply.
    """
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"a line is no whole JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def known_fields(row: Any, kind: type, where: str, special: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a dataclass in a row, without any others: a later version may have added them.

    Args:
        row: As JSON has it.
        kind: The dataclass. Its annotations say what each field may be.
        where: What the row is, for messages.
        special: What fields may be instead that JSON holds in another form.

    Raises:
        ValueError: A field is missing, or is not what it may be.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {shown(row)}, not an object")
    found = {}
    for field in fields(kind):
        if field.name in row:
            check(row[field.name], {**(special or {})}.get(field.name, field.type), f"`{field.name}` of {where}")
            found[field.name] = row[field.name]
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where} misses `{field.name}`")
    return found


def check(value: Any, wanted: Any, where: str) -> None:
    """Raises ValueError where `value`, of JSON, does not fit the annotation `wanted`."""
    if not fits(value, wanted):
        what, kind = culprit(value, wanted)
        raise ValueError(f"{where} {'is' if what is value else 'has'} {shown(what)}, not {named(kind)}")


def culprit(value: Any, wanted: Any) -> tuple[Any, Any]:
    """The innermost value that does not fit its annotation, and that annotation."""
    origin, inner = get_origin(wanted), get_args(wanted)
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, list) and origin is list:
        pairs = [(one, inner[0]) for one in value]
    elif isinstance(value, list) and origin is tuple and len(value) == len(inner):
        pairs = list(zip(value, inner, strict=True))
    elif isinstance(value, dict) and origin is dict:
        pairs = [(one, inner[1]) for one in value.values()]
    return next((culprit(*pair) for pair in pairs if not fits(*pair)), (value, wanted))


def fits(value: Any, wanted: Any) -> bool:
    """Whether a value of JSON fits an annotation. An `int` is no `bool` here, and a `float` is finite."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is dict:
        keys = value if isinstance(value, dict) else []
        right = all(key.isdecimal() and key.isascii() and int(key) < MOST for key in keys) if inner[0] is int else True
        return isinstance(value, dict) and right and all(fits(one, inner[1]) for one in value.values())
    if wanted is int:
        return type(value) is int and -MOST <= value < MOST
    if wanted is float:
        return (type(value) is float and math.isfinite(value)) or fits(value, int)
    return type(value) is wanted


def named(wanted: Any) -> str:
    """An annotation in words."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(map(named, inner))
    if origin is list and inner[0] is Any:
        return "a list"
    if origin is list:
        return f"a list, each {named(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)}: {', '.join(map(named, inner))}"
    if origin is dict:
        keys = " with whole numbers as keys" if inner[0] is int else ""
        return f"an object{keys}" + (f", each {named(inner[1])}" if inner[1] is not Any else "")
    return PLAIN[wanted]


def shown(value: Any) -> str:
    """A value of JSON in a few words, for messages."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def check_objective(objective: Mapping[str, Any]) -> None:
    """Raises ValueError where the parts of an objective are not described as objects with a class."""
    for name in ("surrogate", "kl", "weighting"):
        part = objective.get(name)
        while part is not None:
            if not isinstance(part, dict) or not isinstance(part.get("class"), str):
                raise ValueError(f"`{name}` of the objective is {shown(part)}, not an object with a `class`")
            part = part.get(name)
    for name in ("beta", "entropy_bonus"):
        check(objective.get(name), float | None, f"`{name}` of the objective")


def bytes_of(text: Any, name: str) -> bytes:
    """What base64 packs.

    Raises:
        ValueError: It is none.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError(f"`{name}` of a completion's tokens is no base64") from None
