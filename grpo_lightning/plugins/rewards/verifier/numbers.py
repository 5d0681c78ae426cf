"""Computes values of trees: exact rational numbers, or complex numbers at a point to any precision."""

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache, reduce
from operator import mul, neg, truediv
from typing import Any

from mpmath import MPContext, fp
from mpmath.libmp import ComplexResult, NoConvergence

from grpo_lightning.plugins.rewards.verifier.grammar import Node, number_node, per_tree
from grpo_lightning.plugins.rewards.verifier.words import word_set

MAX_BITS = 40_000
"""The largest number of bits of an exact integer."""
MAX_EXPONENT = 10**7
"""The largest x for which e^x, x! and sin x are computed."""
Point = Mapping[str, Any]


class NoNumber(ValueError):
    """The tree has no value at the point: a division by zero, a value too large, or no number at all."""


def nodes(tree: Node) -> Iterator[Node]:
    """Yields the tree and all its subtrees."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        for child in reversed(node):
            if isinstance(child, tuple) and child:
                inner = [child] if isinstance(child[0], str) else reversed(child)
                pending += [node for node in inner if isinstance(node, tuple) and node]


@per_tree
def symbols(tree: Node) -> frozenset[str]:
    """Returns the names of the variables of a tree."""
    return frozenset(node[1] for node in nodes(tree) if node[0] == "symbol")


def mapped(tree: Any, change: Callable[[Node], Node]) -> Any:
    """Replaces each node by the result of `change`, from the leaves up; returns the tree."""
    return change(tuple(mapped(child, change) for child in tree)) if isinstance(tree, tuple) else tree


def renamed(tree: Node, names: dict[str, str]) -> Node:
    """Returns the tree with variables renamed."""
    return mapped(tree, lambda node: ("symbol", names.get(node[1], node[1])) if node[:1] == ("symbol",) else node)


def literal(tree: Node) -> Fraction | None:
    """Returns the value of a finished number: integer, decimal, fraction, power, scientific notation; else None."""
    return exact(tree) if tree and _is_finished(tree) else None


def _is_finished(tree: Node) -> bool:
    """Tells whether a tree is a number in which nothing is left to compute."""
    kind, *children = tree
    if kind in ("neg", "percent"):
        is_double = children[0][0] == kind or (kind == "neg" and children[0][0] == "number")  # `-(-3)`
        return not is_double and _is_finished(children[0])
    if kind == "div":
        bare = [child[1] if child[0] == "neg" else child for child in children]
        # `a / b^-1` is an unfinished product.
        is_inverse = any(child[0] == "pow" and (exact(child[2]) or 0) < 0 for child in bare)
        return not is_inverse and all(child[0] in ("number", "pow") and _is_finished(child) for child in bare)
    if kind == "pow":
        return children[0][0] == "number" and children[0][1] >= 0 and _is_finished(children[1])
    if kind == "mul" and children[1][0] == "pow" and children[1][1] == number_node(10):
        return _is_finished(children[0]) and _is_finished(children[1])
    return kind == "number"


@per_tree
def exact(tree: Node) -> Fraction | None:
    """Returns the value if rational arithmetic, factorials and binomials give it and it is not too long; else None."""
    kind = tree[0]
    if kind == "number":
        return tree[1]
    if kind == "base":
        return Fraction(int(tree[1], tree[2])) if tree[1].isdigit() and int(max(tree[1])) < tree[2] else None
    operation = _EXACT.get(tree[1] if kind == "call" else kind)
    values = [exact(child) for child in tree[1:] if isinstance(child, tuple)] if operation else [None]
    try:
        return None if operation is None or None in values else Fraction(operation(*values))
    except (ArithmeticError, ValueError, TypeError):
        return None


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
        raise OverflowError
    return base ** _whole(exponent)


def _whole(value: Fraction, largest: int = 10**9) -> int:
    if value.denominator > 1 or value > largest:
        raise ValueError
    return value.numerator


_EXACT: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "mul": mul,
    "div": truediv,
    "neg": neg,
    "abs": abs,
    "percent": lambda a: a / 100,
    "pow": _exact_power,
    "fact": lambda a: math.factorial(_whole(a, 3000)),
    "binom": lambda n, k: math.comb(_whole(n, 10_000), _whole(k, 10_000)),
    "gcd": lambda *values: math.gcd(*map(_whole, values)),
    "lcm": lambda *values: math.lcm(*map(_whole, values)),
    "max": max,
    "min": min,
    "floor": math.floor,
    "ceil": math.ceil,
}


def is_percent(tree: Node) -> bool:
    """Tells whether the tree has a percent sign, apart from a minus sign before it."""
    return bool(tree[0] == "percent" or (tree[0] == "neg" and tree[1][0] == "percent"))


def is_decimal(*trees: Node) -> bool:
    """Tells whether one of the trees contains a decimal."""
    return any(node[0] == "number" and node[2] is not None for tree in trees for node in nodes(tree))


def infinity(tree: Node) -> int:
    """Returns the sign of an infinity: 1 or -1; 0 for other trees."""
    return -infinity(tree[1]) if tree[0] == "neg" else int(tree == ("constant", "inf"))


class Evaluator:
    """Evaluates trees at points, with `digits` digits or, if there are none, in floating point."""

    def __init__(self, digits: int = 0) -> None:
        self.context: Any = MPContext() if digits else fp
        self.is_fast = not digits
        self.largest = 0
        """Order of magnitude of the largest intermediate value, if there are `digits`."""
        self.is_real = True
        """Whether all intermediate values of the last value were real, in floating point."""
        if digits:
            self.context.dps = digits

    def value(self, tree: Node, point: Point) -> Any:
        """Returns the value at a point; raises `NoNumber` if the tree has none there."""
        self.is_real = True
        try:
            return self._seen(self._at(tree, point))
        except (ValueError, ArithmeticError, ComplexResult, NoConvergence, TypeError, LookupError, RecursionError):
            raise NoNumber from None

    def _at(self, tree: Node, point: Point) -> Any:
        kind, *children = tree
        if kind in ("number", "symbol"):
            value = children[0] if kind == "number" else point[children[0]]
            return self._seen(self.context.mpf(value.numerator) / value.denominator)
        if kind == "constant":
            return {"pi": +self.context.pi, "e": +self.context.e, "i": self.context.mpc(0, 1)}[children[0]]
        name, arguments = (children[0], children[1:]) if kind == "call" else (kind, children)
        operation = _OPERATIONS[name]
        values = [self._at(child, point) for child in arguments]
        if kind == "add":
            return reduce(lambda total, term: self._seen(total + term), values)
        return self._seen(operation(self.context, *values))

    def _seen(self, value: Any) -> Any:
        """Notes an intermediate value, and returns it."""
        if not abs(value) < self.context.inf:
            raise NoNumber("not finite")
        if self.is_fast:
            self.is_real &= not isinstance(value, complex) or abs(value.imag) <= 1e-9 * abs(value)
        elif isinstance(magnitude := self.context.mag(value), int):
            self.largest = max(self.largest, abs(magnitude) * 301 // 1000)
        return value


precise = lru_cache(maxsize=8)(Evaluator)
"""Returns the evaluator for a number of digits."""


def _small(value: Any, largest: int = MAX_EXPONENT) -> Any:
    if abs(value) > largest:
        raise NoNumber("too large")
    return value


def _real(ctx: Any, value: Any) -> Any:
    if abs(ctx.im(value)) > abs(value) * ctx.mpf(10) ** -9:
        raise NoNumber("not real")
    return ctx.re(value)


def _raise(ctx: Any, base: Any, exponent: Any) -> Any:
    """Returns x^y; an odd root of a negative number is real."""
    if base == 0:
        if ctx.im(exponent) or ctx.re(exponent) <= 0:
            raise NoNumber("a power of zero")
        return ctx.mpf(0)
    _small(exponent * (abs(ctx.log(abs(base))) + 1))
    if not ctx.im(base) and not ctx.im(exponent) and ctx.re(base) < 0:
        base = ctx.re(base)
        exponent = ctx.re(exponent)
        for odd in (1, 3, 5, 7, 9):
            nearest = ctx.floor(exponent * odd + ctx.mpf(0.5))
            if abs(exponent * odd - nearest) <= 10 * ctx.eps * abs(nearest):
                magnitude = ctx.power(-base, exponent)
                return -magnitude if int(nearest) % 2 else magnitude
    return ctx.power(base, exponent)


def _factorial(ctx: Any, value: Any) -> Any:
    if not ctx.im(value) and ctx.re(value) < 0 and ctx.re(value) == ctx.floor(ctx.re(value)):
        raise NoNumber("a factorial of a negative integer")
    return ctx.gamma(_small(value) + 1)


def _logarithm(ctx: Any, value: Any, base: Any) -> Any:
    if value == 0:
        raise NoNumber("a logarithm of zero")
    return ctx.log(value) / ctx.log(base)


def _floor(ctx: Any, value: Any) -> Any:
    value = _real(ctx, value)
    nearest = ctx.floor(value + ctx.mpf(0.5))
    return nearest if abs(value - nearest) <= 1e3 * ctx.eps * (1 + abs(value)) else ctx.floor(value)


def _of(name: str) -> Callable[..., Any]:
    return lambda ctx, value: getattr(ctx, name)(_small(value))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda ctx, *values: sum(values),
    "neg": lambda ctx, a: -a,
    "mul": lambda ctx, a, b: a * b,
    "div": lambda ctx, a, b: a / b,
    "pow": _raise,
    "root": lambda ctx, n, a: ctx.sqrt(a) if n == 2 else _raise(ctx, a, 1 / n),
    "fact": _factorial,
    "percent": lambda ctx, a: a / 100,
    "degree": lambda ctx, a: a * ctx.pi / 180,
    "abs": lambda ctx, a: abs(a),
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
    "ln": lambda ctx, a: _logarithm(ctx, a, ctx.e),
    **dict.fromkeys(("lg", "log"), lambda ctx, a: _logarithm(ctx, a, ctx.mpf(10))),
    "log_": lambda ctx, base, a: _logarithm(ctx, a, base),
    "arccot": lambda ctx, a: ctx.pi / 2 - ctx.atan(a),
    **{f"arc{name}": _of(f"a{name}") for name in word_set("sin cos tan sec csc")},
    **{name: _of(name) for name in word_set("sin cos tan cot sec csc sinh cosh tanh")},
}
