"""Compares two formulas by their values, at points of all signs and on both sides of every kink."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

from grpo_lightning.plugins.verifier.grammar import Node
from grpo_lightning.plugins.verifier.numbers import Fast, NoNumber, Point, exact, literal, nodes, precise, symbols
from grpo_lightning.plugins.verifier.symbolic import identical

DIGITS, MAX_DIGITS = 45, 4000
NUM_POINTS, MIN_POINTS, NUM_PRECISE, NUM_SPARE = 64, 12, 6, 800
CONSTANTS = ("C", "K", "C_1", "C_0")
"""Names of a constant of integration in a gold answer; an answer may use more."""
_CONSTANTS = (*CONSTANTS, "c", "k", "c_1", "D")
_SIZES = (Fraction(2, 5), Fraction(3, 2), Fraction(4), Fraction(15), Fraction(60))
_WIDE = (*_SIZES, Fraction(1, 1000), Fraction(1, 30), Fraction(300), Fraction(5000), Fraction(10**6))
_COUNTERS = frozenset("nkmNijpq")
_FAST = Fast()


@dataclass(frozen=True, slots=True)
class Context:
    """Facts from the question about the variables of its answer."""

    counts: bool = False
    """Whether some variables are integers."""
    given: frozenset[str] = frozenset()
    """The `CONSTANTS` that the question itself uses."""


def equal(gold: Node, answer: Node, context: Context = Context()) -> bool:
    """Whether two formulas have the same value wherever one of them has a value."""
    if gold == answer:
        return True
    if not symbols(gold) and not symbols(answer):
        return equal_constants(gold, answer)
    gold_constant, answer_constant = _integration_constant(gold), _integration_constant(answer)
    if gold_constant in CONSTANTS and gold_constant not in context.given and symbols(_without(gold, gold_constant)):
        gold, answer = _without(gold, gold_constant), _without(answer, answer_constant)
        is_family = bool(answer_constant) and symbols(answer) <= symbols(gold)
        return is_family and _agree(gold, answer, up_to_constant=True)
    if not symbols(answer) <= symbols(gold):
        return False
    if _is_about_integers(gold):
        return _agree(gold, answer, in_integers=True)
    return _agree(gold, answer) or (
        context.counts and symbols(gold) <= _COUNTERS and _agree(gold, answer, in_integers=True)
    )


def equal_constants(gold: Node, answer: Node) -> bool:
    """Whether two formulas without variables have the same value; a long decimal is compared up to its digits."""
    gold_value, answer_value = exact(gold), exact(answer)
    if gold_value is not None and answer_value is not None:
        return gold_value == answer_value
    try:
        left, other, digits = _both(gold, answer, {})
    except NoNumber:
        return False
    gap, size = abs(left - other), max(abs(left), abs(other))
    decimals = [tree[2] for tree in (gold, answer) if tree[0] == "number" and tree[2] is not None]
    if decimals and decimals[0] >= 8:
        return bool(gap * 10**8 <= size)
    return bool(gap * 10 ** (digits - 15) <= size)


def proportional(gold: Node, answer: Node) -> Fraction | None:
    """The sign of c if `answer` is `c * gold` for a number c; else None."""
    if not symbols(gold) or symbols(gold) != symbols(answer):
        return None
    found = [(point, ratio) for point in _points(gold, answer) if (ratio := _ratio(gold, answer, point)) is not None][
        :24
    ]
    first = found[0][1] if len(found) >= MIN_POINTS else 1j
    if abs(first.imag) > 1e-9 * abs(first) or any(abs(other - first) > 1e-9 * abs(first) for _, other in found):
        return None
    try:  # floating point cannot tell 10^-9 from 2 * 10^-9 beside x
        precise = [_precise_ratio(gold, answer, point) for point, _ in found[:4]]
    except NoNumber:
        return None
    if any(abs(a - b) * 10**20 > abs(a) for a, b in pairwise(precise)):
        return None
    return Fraction(1 if first.real > 0 else -1)


def _precise_ratio(gold: Node, answer: Node, point: Point) -> Any:
    left, right, _ = _both(gold, answer, point)
    if not left:
        raise NoNumber("zero")
    return right / left


def _ratio(gold: Node, answer: Node, point: Point) -> complex | None:
    try:
        left, right = _FAST.value(gold, point), _FAST.value(answer, point)
        return complex(right / left) if abs(left) > 1e-12 and abs(right) > 1e-300 else None
    except (NoNumber, OverflowError, ZeroDivisionError):
        return None


def _integration_constant(tree: Node) -> str:
    """The name C of `F(x) + C`; empty if the tree is no such sum."""
    if tree[0] != "add":
        return ""
    alone = [term[1] for term in tree[1:] if term[0] == "symbol" and term[1] in _CONSTANTS]
    rest = [name for name in alone if name not in symbols(("add", *(t for t in tree[1:] if t != ("symbol", name))))]
    return next((name for name in _CONSTANTS if name in rest), "")


def _without(tree: Node, name: str) -> Node:
    if not name:
        return tree
    terms = [term for term in tree[1:] if term != ("symbol", name)]
    return terms[0] if len(terms) == 1 else ("add", *terms)


def _agree(gold: Node, answer: Node, up_to_constant: bool = False, in_integers: bool = False) -> bool:
    is_complex = any(node == ("constant", "i") for tree in (gold, answer) for node in nodes(tree))
    good: list[Point] = []
    shift: Any = 0
    wanted = list(_points(gold, answer, in_integers))
    for number, point in enumerate(chain(wanted, () if in_integers else _spare(wanted[0]))):
        if number >= len(wanted) and len(good) >= MIN_POINTS:
            break
        left = _fast_value(gold, point)
        left_is_real = not _FAST.left_reals
        right = _fast_value(answer, point)
        right_is_real = not _FAST.left_reals
        if left is None and right is None:
            continue
        if left is None or right is None:
            if not is_complex and not (left_is_real if right is None else right_is_real):
                continue
            if in_integers and any(value < 0 for value in point.values()):
                continue  # a counter is rarely negative
            try:
                _both(gold, answer, point)
                continue  # too large for floating point only
            except NoNumber:
                return False
        if not is_complex and left_is_real != right_is_real:
            if _is_other_branch(left, right, point):
                continue
            return False
        if not is_complex and not left_is_real:
            continue
        if up_to_constant and not good:
            shift = left - right
        gap, size = abs(left - right - shift), max(abs(left), abs(right), abs(shift))
        if gap > 1e-9 * size and (up_to_constant or _differ(gold, answer, point) is not False):
            return False
        good.append(point)
    if len(good) < MIN_POINTS:
        return not up_to_constant and identical(gold, answer)
    chosen = good[:: max(1, len(good) // (2 * NUM_PRECISE))]
    if up_to_constant:
        try:
            values = [_both(gold, answer, point)[:2] for point in chosen[:NUM_PRECISE]]
        except NoNumber:
            return False
        gaps = [left - right for left, right in values]
        size = max(max(abs(left), abs(right)) for left, right in values)
        return all(abs(gap - gaps[0]) * 10**25 <= size for gap in gaps)
    verdicts = [_differ(gold, answer, point) for point in chosen[: 2 * NUM_PRECISE]]
    return verdicts.count(False) >= min(3, len(verdicts)) and True not in verdicts


def _fast_value(tree: Node, point: Point) -> complex | None:
    try:
        return _FAST.value(tree, point)
    except NoNumber:
        return None


def _differ(gold: Node, answer: Node, point: Point) -> bool | None:
    """Whether the values differ at a point; None if one is too large to tell."""
    try:
        left, right, digits = _both(gold, answer, point)
    except NoNumber:
        return None
    return bool(abs(left - right) * 10 ** (digits - 20) > max(abs(left), abs(right)))


def _both(gold: Node, answer: Node, point: Point) -> tuple[Any, Any, int]:
    """Both values and the number of significant digits.

    More digits are computed if an intermediate term is large, since cancellation loses them.

    Raises:
        NoNumber: A formula has no value, or a term is too large.
    """
    digits = DIGITS
    for _ in range(2):
        by = precise(digits)
        by.largest = 0
        values = by.value(gold, point), by.value(answer, point)
        if by.largest <= digits - DIGITS + 8:
            return *values, max(DIGITS, digits - by.largest)
        if by.largest > MAX_DIGITS:
            break
        digits = DIGITS + 100 * (by.largest // 100 + 1)
    raise NoNumber("too large")


def _is_real(value: complex) -> bool:
    return abs(value.imag) <= 1e-9 * abs(value)


def _is_other_branch(left: complex, right: complex, point: Point) -> bool:
    r"""Whether two values differ only in the branch: `\sqrt x\sqrt y` and `\sqrt{xy}` at negative numbers are equal."""
    twice = sum(value < 0 for value in point.values()) > 1
    return twice and abs(abs(left) - abs(right)) <= 1e-9 * abs(left)


# ----- points


def _points(gold: Node, answer: Node, in_integers: bool = False) -> Iterator[Point]:
    """The points of comparison: all signs and sizes of each variable, and both sides of every kink."""
    names = tuple(sorted(symbols(gold) | symbols(answer)))
    trees = tuple(node for tree in (gold, answer) for node in nodes(tree))
    if in_integers:
        yield from _integers(names, 150 if any(map(_grows, trees)) else 10**4)
        return
    points = list(_grid(names))
    yield from points
    sizes = {abs(node[1]) for node in trees if node[0] == "number" and 8 < abs(node[1]) < 10**9}
    rng = random.Random(0)
    for size in sorted(sizes)[:4]:
        for _ in range(8):
            yield {name: size * Fraction(rng.randrange(-300, 300) | 1, 97) for name in names}
    if any(node[0] == "call" and node[1] in ("floor", "ceil", "mod") for node in trees):
        for _ in range(3 * NUM_POINTS):
            yield {name: Fraction(rng.randrange(-3000, 3000), 97) for name in names}
    for kink in {kink for node in trees for kink in _kinks(node) if symbols(kink)}:
        yield from _other_side(kink, names, points)


def _spare(like: Point) -> Iterator[Point]:
    """More points, for formulas with a value at few points."""
    rng = random.Random(2)
    for _ in range(NUM_SPARE):
        yield {name: rng.choice(_SIZES) * Fraction(rng.randrange(-1500, 1500) | 1, 997) for name in like}


@lru_cache(maxsize=1 << 10)
def _grid(names: tuple[str, ...]) -> tuple[dict[str, Fraction], ...]:
    rng = random.Random(repr(names))
    points = []
    for index in range(NUM_POINTS):
        point = {}
        for position, name in enumerate(names):
            negative = index >> position & 1 if position < 5 else rng.random() < 0.5
            size = rng.choice(_SIZES) * Fraction(rng.randrange(500, 1500), 997)
            point[name] = -size if negative else size
        points.append(point)
    return tuple(points)


@lru_cache(maxsize=1 << 10)
def _integers(names: tuple[str, ...], largest: int) -> tuple[dict[str, Fraction], ...]:
    """Points of integers: most of them small, some negative, some large."""
    rng = random.Random(repr(names))
    ranges = [(0, 8 + index) if index % 4 else (0, largest) for index in range(NUM_POINTS)]
    ranges += [(-8 - 4 * index, 4 * index) for index in range(NUM_POINTS // 4)]
    return tuple({name: Fraction(rng.randrange(*bounds)) for name in names} for bounds in ranges)


def _grows(node: Node) -> bool:
    """Whether the value at a large integer is too large to compute."""
    if node[0] == "pow" and symbols(node[2]):
        return abs(literal(node[1]) or 0) != 1
    return node[0] == "fact" or (node[0] == "call" and node[1] in ("binom", "!!"))


def _is_about_integers(gold: Node) -> bool:
    r"""Whether the gold answer is for integers only: `(-1)^n`, `n!!`, `\lfloor n/2 \rfloor`, `\cos n\pi`."""
    for node in nodes(gold):
        if node[0] == "pow" and symbols(node[2]) and (base := literal(node[1])) is not None and base < 0:
            return True
        if node[0] == "call" and node[1] in ("!!", "gcd", "lcm"):
            return True
        is_rounded = node[0] == "call" and node[1] in ("floor", "ceil", "mod")
        is_periodic = node[0] == "call" and node[1] in ("sin", "cos", "tan") and ("constant", "pi") in nodes(node)
        if (is_rounded or is_periodic) and symbols(node) and symbols(node) <= _COUNTERS:
            return True
    return False


def _kinks(node: Node) -> list[Node]:
    """The subformulas whose sign decides the branch of the formula."""
    one = ("number", Fraction(1), None)
    if node[0] == "abs":
        return [node[1]]
    if node[0] == "root":
        return [node[2]]
    if node[0] == "pow":
        exponent = literal(node[2])
        return [node[1]] if exponent is None or exponent.denominator > 1 else []
    if node[0] == "call":
        if node[1] in ("ln", "log", "lg", "log_", "sgn", "sin", "cos", "tan", "cot", "sec", "csc"):
            return [node[-1]]
        if node[1] in ("max", "min"):
            return [("add", a, ("neg", b)) for a, b in pairwise(node[2:])]
        if node[1].startswith("arc"):
            return [node[2], ("add", node[2], one), ("add", node[2], ("neg", one))]
    return []


def _other_side(kink: Node, names: tuple[str, ...], points: Sequence[Point]) -> Iterator[Point]:
    """Points on the sides of a kink that have fewer than four."""
    counts = {True: 0, False: 0}
    for point in points:
        value = _fast_value(kink, point)
        if value is not None and _is_real(value):
            counts[value.real > 0] += 1
    missing = [side for side, count in counts.items() if count < 4]
    if not missing:
        return
    rng = random.Random(1)
    found = 0
    for _ in range(200):
        point = {
            name: rng.choice((1, -1)) * rng.choice(_WIDE) * Fraction(rng.randrange(500, 1500), 997) for name in names
        }
        value = _fast_value(kink, point)
        if value is not None and _is_real(value) and (value.real > 0) in missing:
            yield point
            found += 1
        if found >= 4:
            return
