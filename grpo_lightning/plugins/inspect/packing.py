"""Dataclasses as JSON and back. Arrays are packed: base64 of little-endian float32, float16, int32 or int8."""

import base64
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin

import numpy as np

Array = np.ndarray

NUM_ALTERNATIVES = 5
"""K, how many of the likeliest tokens are recorded at each position."""
NUM_CURVE = 40

DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("ids", "top_before_ids", "top_after_ids"), "<i4"),
    **dict.fromkeys(("given", "clip"), "<i1"),
    **dict.fromkeys(("curve", "curve_kl"), "<f2"),
}
"""Types of the arrays that are not float32, by the name of their field."""

WIDTHS: Mapping[str, int] = {
    **{f"top_{when}_{what}": NUM_ALTERNATIVES for when in ("before", "after") for what in ("ids", "logp")},
    **{"near": 2, "curve": NUM_CURVE, "curve_kl": NUM_CURVE, "bounds": 2},
}


def pack(value: Any, name: str = "") -> Any:
    """A dataclass, an array, a container or a plain value as JSON; `name` is that of its field.

    A field of a dataclass that could hold an array or a dataclass, and is None, is left out.
    """
    if isinstance(value, Array):
        return base64.b64encode(np.ascontiguousarray(value, DTYPES.get(name, "<f4")).tobytes()).decode()
    if is_dataclass(value):
        parts = [(field, getattr(value, field.name)) for field in fields(value)]
        return {f.name: pack(part, f.name) for f, part in parts if part is not None or not _is_large(f.type)}
    if isinstance(value, dict):
        return {str(key): pack(part) for key, part in value.items()}
    return [pack(part) for part in value] if isinstance(value, (list, tuple)) else value


def unpack(kind: Any, value: Any, name: str = "") -> Any:
    """The inverse of `pack`: a value of JSON as an annotation says. Fields of a later version are left out."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else unpack(inner[0], value, name)
    if kind is Array:
        values = np.frombuffer(base64.b64decode(value, validate=True), DTYPES.get(name, "<f4"))
        return values.reshape(-1, WIDTHS[name]) if name in WIDTHS else values
    if is_dataclass(kind):
        known = {f.name: unpack(f.type, value[f.name], f.name) for f in fields(kind) if f.name in value}
        return kind(**known)  # type: ignore[operator]
    if origin is list:
        return [unpack(inner[0], one) for one in value]
    if origin is tuple:
        return tuple(unpack(part, one) for part, one in zip(inner, value, strict=True))
    if origin is dict:
        return {inner[0](key): unpack(inner[1], one) for key, one in value.items()}
    return value


def _is_large(kind: Any) -> bool:
    first = next(iter(get_args(kind)), None)
    return first is Array or is_dataclass(first)
