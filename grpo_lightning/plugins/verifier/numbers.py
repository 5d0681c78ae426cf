"""Computes values of trees: exact rational numbers, or complex numbers at a point to any precision."""

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any
from zlib import crc32

from mpmath import MPContext, fp
from mpmath.libmp import ComplexResult, NoConvergence

from grpo_lightning.plugins.verifier.grammar import Node

MAX_BITS = 40_000
"""Largest size of an exact integer, in bits."""
MAX_EXPONENT = 10**7
"""Largest x for which e^x, x! and sin x are computed."""
Point = Mapping[str, Any]


class NoNumber(ValueError):
    """The tree has no value at the point: a division by zero, a value too large, or no number at all."""


def nodes(tree: Node) -> Iterator[Node]:
    """Yields the tree and all its subtrees."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        for part in reversed(node):
            if isinstance(part, tuple) and part:
                inner = [part] if isinstance(part[0], str) else reversed(part)
                pending += [p for p in inner if isinstance(p, tuple) and p]


@lru_cache(maxsize=1 << 13)
def symbols(tree: Node) -> frozenset[str]:
    """The names of the variables of a tree."""
    return frozenset(node[1] for node in nodes(tree) if node[0] == "symbol")


def literal(tree: Node) -> Fraction | None:
    """The value of a finished number: integer, decimal, fraction, power or scientific notation; None for others."""
    return exact(tree) if tree and _is_finished(tree) else None


def _is_finished(tree: Node) -> bool:
    kind, *parts = tree
    if kind in ("neg", "percent"):
        return parts[0][0] != kind and _is_finished(parts[0])
    if kind == "div":
        bare = [part[1] if part[0] == "neg" else part for part in parts]
        return all(part[0] in ("number", "pow") and _is_finished(part) and not _is_inverse(part) for part in bare)
    if kind == "pow":
        return parts[0][0] == "number" and parts[0][1] >= 0 and _is_finished(parts[1])
    if kind == "mul" and parts[1][0] == "pow" and parts[1][1] == ("number", Fraction(10), None):
        return _is_finished(parts[0]) and _is_finished(parts[1])
    return kind == "number"


def _is_inverse(tree: Node) -> bool:
    """Whether a power has a negative exponent: `a / b^-1` is an unfinished product."""
    return tree[0] == "pow" and (exact(tree[2]) or 0) < 0


@lru_cache(maxsize=1 << 13)
def exact(tree: Node) -> Fraction | None:
    """The value if rational arithmetic, factorials and binomials give it and it is not too long; else None."""
    kind = tree[0]
    if kind == "number":
        return tree[1]
    if kind == "base":
        return Fraction(int(tree[1], tree[2])) if tree[1].isdigit() and int(max(tree[1])) < tree[2] else None
    operation = _EXACT.get(tree[1] if kind == "call" else kind)
    parts = [exact(part) for part in tree[1:] if isinstance(part, tuple)] if operation else [None]
    try:
        return None if operation is None or None in parts else Fraction(operation(*parts))
    except (ArithmeticError, ValueError, TypeError):
        return None


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
        raise OverflowError
    return base ** _whole(exponent)


def _whole(value: Fraction) -> int:
    if value.denominator > 1 or abs(value) > 10**9:
        raise ValueError
    return value.numerator


def _of_wholes(function: Callable[..., int], largest: int) -> Callable[..., int]:
    def apply(*values: Fraction) -> int:
        wholes = [_whole(value) for value in values]
        if max(wholes) > largest:
            raise OverflowError
        return function(*wholes)

    return apply


_EXACT: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": abs,
    "percent": lambda a: a / 100,
    "pow": _exact_power,
    "fact": _of_wholes(math.factorial, 3000),
    "binom": _of_wholes(math.comb, 10_000),
    "gcd": _of_wholes(math.gcd, 10**9),
    "lcm": _of_wholes(math.lcm, 10**9),
    "max": max,
    "min": min,
    "floor": math.floor,
    "ceil": math.ceil,
}


def is_percent(tree: Node) -> bool:
    """Whether the tree has a percent sign, apart from a minus sign before it."""
    return bool(tree[0] == "percent" or (tree[0] == "neg" and tree[1][0] == "percent"))


def is_decimal(*trees: Node) -> bool:
    """Whether one of the trees contains a decimal."""
    return any(node[0] == "number" and node[2] is not None for tree in trees for node in nodes(tree))


def infinity(tree: Node) -> int:
    """The sign of an infinity: 1 or -1; 0 for other trees."""
    if tree[0] == "neg":
        return -infinity(tree[1])
    return int(tree == ("constant", "inf"))


def is_infinite(tree: Node) -> bool:
    """Whether the tree is an infinity of either sign."""
    return infinity(tree) != 0


class Evaluator:
    """Evaluates trees at points, with `digits` digits or, if there are none, in floating point."""

    def __init__(self, digits: int = 0) -> None:
        self.context: Any = MPContext() if digits else fp
        self.is_fast = not digits
        self.largest = 0
        """Order of magnitude of the largest intermediate value, if it has digits."""
        self.left_reals = False
        """Whether an intermediate value of the last one was not real, in floating point."""
        if digits:
            self.context.dps = digits

    def value(self, tree: Node, point: Point) -> Any:
        """The value at a point.

        Raises:
            NoNumber: The tree has no value there.
        """
        self.left_reals = False
        try:
            value = _evaluate(tree, point, self.context, self)
        except (ValueError, ArithmeticError, ComplexResult, NoConvergence, TypeError, RecursionError) as error:
            raise NoNumber(str(error)) from None
        if not abs(value) < self.context.inf:
            raise NoNumber("not finite")
        return value

    def seen(self, value: Any) -> None:
        """Notes an intermediate value."""
        if self.is_fast:
            self.left_reals |= isinstance(value, complex) and abs(value.imag) > 1e-9 * abs(value)
        elif isinstance(magnitude := self.context.mag(value), int):
            self.largest = max(self.largest, abs(magnitude) * 301 // 1000)


@lru_cache(maxsize=8)
def precise(digits: int) -> Evaluator:
    """The cached evaluator for a number of digits."""
    return Evaluator(digits)


def _evaluate(tree: Node, point: Point, ctx: Any, by: Any) -> Any:
    kind = tree[0]
    if kind == "number":
        value = tree[1]
        result = ctx.mpf(value.numerator) / value.denominator
        by.seen(result)
        return result
    if kind == "symbol":
        return ctx.convert(point[tree[1]]) if ctx is not fp else float(point[tree[1]])
    if kind == "constant":
        if tree[1] == "inf":
            raise NoNumber("infinity")
        return {"pi": +ctx.pi, "e": +ctx.e, "i": ctx.mpc(0, 1)}[tree[1]]
    if kind == "add":
        total = _evaluate(tree[1], point, ctx, by)
        for part in tree[2:]:
            term = _evaluate(part, point, ctx, by)
            by.seen(term)
            total = total + term
        return total
    if kind == "apply":
        return _opaque(tree[1], [_evaluate(part, point, ctx, by) for part in tree[2:]], ctx)
    if kind == "call":
        function, arguments = tree[1], tree[2:]
    elif kind in _OPERATIONS:
        function, arguments = kind, tree[1:]
    else:
        raise NoNumber(f"a {kind} is no number")
    values = [_evaluate(part, point, ctx, by) for part in arguments]
    for value in values:
        if value != value or abs(value) == ctx.inf:
            raise NoNumber("not finite")
    operation = _OPERATIONS.get(function)
    if operation is None:
        raise NoNumber(f"no {function} of numbers")
    result = operation(ctx, *values)
    by.seen(result)
    return result


def _opaque(name: str, values: list[Any], ctx: Any) -> Any:
    """The value of an unknown function: an arbitrary smooth function, fixed by its name."""
    seed = crc32(name.encode())
    total = ctx.mpf(seed % 977 + 1) / 331
    for index, value in enumerate(values):
        total = total + value * (ctx.mpf(seed // (index + 3) % 89 + 7) / 53)
    if abs(total) > MAX_EXPONENT:
        raise NoNumber("too large")
    return ctx.sin(total) * (2 + seed % 5) + total / 7


def _small(value: Any, largest: int = MAX_EXPONENT) -> Any:
    if abs(value) > largest:
        raise NoNumber("too large")
    return value


def _real(ctx: Any, value: Any) -> Any:
    if abs(ctx.im(value)) > abs(value) * ctx.mpf(10) ** -9:
        raise NoNumber("not real")
    return ctx.re(value)


def _nearest(ctx: Any, value: Any) -> Any:
    return ctx.floor(ctx.re(value) + ctx.mpf(0.5))


def _raise(ctx: Any, base: Any, exponent: Any) -> Any:
    """x^y; an odd root of a negative number is real."""
    if base == 0:
        if ctx.im(exponent) or ctx.re(exponent) <= 0:
            raise NoNumber("a power of zero")
        return ctx.mpf(0)
    _small(exponent * (abs(ctx.log(abs(base))) + 1))
    if not ctx.im(base) and not ctx.im(exponent) and ctx.re(base) < 0:
        base, exponent = ctx.re(base), ctx.re(exponent)
        for odd in (1, 3, 5, 7, 9):
            nearest = _nearest(ctx, exponent * odd)
            if abs(exponent * odd - nearest) <= 10 * ctx.eps * abs(nearest):
                magnitude = ctx.power(-base, exponent)
                return -magnitude if int(nearest) % 2 else magnitude
    return ctx.power(base, exponent)


def _factorial(ctx: Any, value: Any) -> Any:
    _small(value)
    if not ctx.im(value) and ctx.re(value) < 0 and ctx.re(value) == ctx.floor(ctx.re(value)):
        raise NoNumber("a factorial of a negative integer")
    return ctx.gamma(value + 1)


def _logarithm(ctx: Any, value: Any, base: Any = None) -> Any:
    if value == 0:
        raise NoNumber("a logarithm of zero")
    return ctx.log(value) if base is None else ctx.log(value) / ctx.log(base)


def _floor(ctx: Any, value: Any) -> Any:
    value = _real(ctx, value)
    nearest = _nearest(ctx, value)
    return nearest if abs(value - nearest) <= 1e3 * ctx.eps * (1 + abs(value)) else ctx.floor(value)


def _of(name: str) -> Callable[..., Any]:
    return lambda ctx, value: getattr(ctx, name)(_small(value))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "neg": lambda ctx, a: -a,
    "mul": lambda ctx, a, b: a * b,
    "div": lambda ctx, a, b: a / b,
    "pow": _raise,
    "root": lambda ctx, n, a: ctx.sqrt(a) if n == 2 else _raise(ctx, a, 1 / n),
    "fact": _factorial,
    "!!": lambda ctx, a: ctx.fac2(_small(_real(ctx, a))),
    "percent": lambda ctx, a: a / 100,
    "degree": lambda ctx, a: a * ctx.pi / 180,
    "abs": lambda ctx, a: abs(a),
    "conj": lambda ctx, a: ctx.conj(a),
    "binom": lambda ctx, n, k: ctx.binomial(_small(n), _small(k, 10**5)),
    "floor": _floor,
    "ceil": lambda ctx, a: -_floor(ctx, -a),
    "mod": lambda ctx, a, b: a - b * _floor(ctx, a / b),
    "max": lambda ctx, *values: max(_real(ctx, value) for value in values),
    "min": lambda ctx, *values: min(_real(ctx, value) for value in values),
    "sgn": lambda ctx, a: ctx.sign(_real(ctx, a)),
    "Re": lambda ctx, a: ctx.re(a),
    "Im": lambda ctx, a: ctx.im(a),
    "arg": lambda ctx, a: ctx.arg(a),
    "ln": _logarithm,
    "lg": lambda ctx, a: _logarithm(ctx, a, ctx.mpf(10)),
    "log": lambda ctx, a: _logarithm(ctx, a, ctx.mpf(10)),
    "log_": lambda ctx, base, a: _logarithm(ctx, a, base),
    "exp": lambda ctx, a: ctx.exp(_small(a)),
    "arcsin": _of("asin"), "arccos": _of("acos"), "arctan": _of("atan"),
    "arccot": lambda ctx, a: ctx.pi / 2 - ctx.atan(a),
    "arcsec": _of("asec"), "arccsc": _of("acsc"), "sinh": _of("sinh"), "cosh": _of("cosh"), "tanh": _of("tanh"),
    **{name: _of(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
}  # fmt: skip
