"""Compares two formulas by their values, at points of all signs and sizes and around every constant."""

import random
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from grpo_lightning.plugins.rewards.verifier.grammar import Node
from grpo_lightning.plugins.rewards.verifier.numbers import (
    Evaluator,
    NoNumber,
    Point,
    exact,
    is_decimal,
    literal,
    nodes,
    precise,
    symbols,
)
from grpo_lightning.plugins.rewards.verifier.symbolic import identical

DIGITS, MAX_DIGITS = 45, 4000
NUM_POINTS, MIN_POINTS = 64, 12
NUM_PRECISE, MAX_CONSTANTS = 12, 4
_C: Node = ("symbol", "C")
r"""The constant of integration: `\sin^2 x + C` is `-\cos^2 x + C`."""
_SIZES = (Fraction(2, 5), Fraction(3, 2), Fraction(4), Fraction(15), Fraction(60))
_COUNTERS = frozenset("nkmNijpq")
ROUNDED = ("floor", "ceil", "mod")
_FAST = Evaluator()


def equal(gold: Node, answer: Node, counts: bool = False, integrates: bool = False) -> bool:
    """Tells whether two formulas have the same value wherever one of them has a value.

    With `counts` it is enough that they agree at integers. With `integrates` C is a constant of integration.
    """
    if gold == answer:
        return True
    if not symbols(gold) and not symbols(answer):
        return equal_constants(gold, answer)
    if not symbols(answer) <= symbols(gold):
        return False
    if integrates and _C in gold[1:] and _C in answer[1:] and len(symbols(gold)) > 1:
        return constant(("add", gold, ("neg", answer))) is not None
    in_integers = _is_about_integers(gold)
    is_counted = counts and not in_integers and symbols(gold) <= _COUNTERS
    return _agree(gold, answer, in_integers) or (is_counted and _agree(gold, answer, in_integers=True))


def same_family(gold: Node, answer: Node, counter: str) -> bool:
    """Tells whether two formulas run through the same values, equally far apart: `k pi - pi/4` and `k pi + 3 pi/4`."""
    if not counter or not symbols(gold) == symbols(answer) == {counter}:
        return False
    evaluator = precise(DIGITS)
    try:
        values = [[evaluator.value(tree, {counter: Fraction(n)}) for n in (0, 1, 7)] for tree in (gold, answer)]
    except NoNumber:
        return False

    # Both are linear in the counter, with steps of one size, and an integer number of steps apart.
    steps = [second - start for start, second, _ in values]
    near = evaluator.context.mpf(10) ** -20 * max(map(abs, (*values[0], *values[1])))
    is_linear = all(abs(far - start - 7 * step) <= near for (start, _, far), step in zip(values, steps, strict=True))
    if not is_linear or abs(steps[0]) <= near or abs(abs(steps[0]) - abs(steps[1])) > near:
        return False
    shift = (values[1][0] - values[0][0]) / steps[0]
    return bool(abs(shift - evaluator.context.nint(shift.real)) <= 1e-20 * (1 + abs(shift)))


def equal_constants(gold: Node, answer: Node) -> bool:
    """Tells whether two formulas without variables have the same value; a long decimal is compared up to its digits."""
    gold_value = exact(gold)
    answer_value = exact(answer)
    if gold_value is not None and answer_value is not None:
        return gold_value == answer_value
    try:
        left, right, digits = _both(gold, answer, {})
    except NoNumber:
        return False
    decimals = next((tree[2] for tree in (gold, answer) if tree[0] == "number" and tree[2] is not None), 0)
    return bool(abs(left - right) * 10 ** (8 if decimals >= 8 else digits - 15) <= max(abs(left), abs(right)))


def is_close(value: Node, decimal: Node, rounded: bool) -> bool:
    """Tells whether a decimal is close to a value: within half a unit of its last digit, or 1 %."""
    if symbols(value) or symbols(decimal) or (rounded and not is_decimal(decimal)):
        return value == decimal
    evaluator = precise(30)
    try:
        expected = evaluator.value(value, {})
        actual = evaluator.value(decimal, {})
    except NoNumber:
        return False
    decimals = max((node[2] for node in nodes(decimal) if node[0] == "number" and node[2] is not None), default=0)
    return bool(abs(expected - actual) <= max(abs(expected) / 100, evaluator.context.mpf(10) ** -decimals / 2))


def constant(tree: Node) -> Any:
    """Returns the value of a formula that has the same value at all points, as `2x/x`; else None."""
    evaluator = precise(DIGITS)
    values: list[Any] = []
    for point in _points(tree):
        evaluator.largest = 0
        try:
            value = evaluator.value(tree, point)
        except NoNumber:
            continue
        values += [value] if evaluator.largest < DIGITS - 30 else []
        if len(values) > MIN_POINTS:
            break
    is_constant = len(values) > MIN_POINTS and all(
        abs(value - values[0]) <= 1e-20 * (1 + abs(value)) for value in values
    )
    return values[0] if is_constant else None


# ----- values at points


def _agree(gold: Node, answer: Node, in_integers: bool = False, is_complex: bool = False) -> bool:
    """Tells whether two formulas have the same values, first in floating point, then at some points precisely.

    Complex values count where the imaginary unit is in one of them, or where there are no real ones.
    """
    is_complex |= any(node == ("constant", "i") for tree in (gold, answer) for node in nodes(tree))
    # In floating point at all points: one difference is enough.
    good: list[Point] = []
    operands = ("add", gold, answer)
    for point in _integers(operands) if in_integers else _points(operands):
        verdict = _agree_at(gold, answer, point, is_complex)
        if verdict is False:
            return False
        good += [point] if verdict else []

    # Points with complex values, where there are too few others; then precisely, at some of the points.
    if len(good) < MIN_POINTS and not is_complex:
        return identical(gold, answer) or _agree(gold, answer, in_integers, is_complex=True)
    points = good[:: max(1, len(good) // NUM_PRECISE)][:NUM_PRECISE]
    verdicts = [_differ(gold, answer, point) for point in points]
    return len(good) >= MIN_POINTS and verdicts.count(False) >= min(3, len(verdicts)) and True not in verdicts


def _agree_at(gold: Node, answer: Node, point: Point, is_complex: bool) -> bool | None:
    """Tells whether two formulas agree at a point; None if neither has a value there, or one is too large to tell."""
    left, left_is_real = _fast_value(gold, point)
    right, right_is_real = _fast_value(answer, point)
    is_real = is_complex or (left_is_real and right_is_real)
    if left is None or right is None:
        is_open = left is right or not is_real
        is_open = is_open or _differ(gold, answer, point) is not None  # too large for floating point only
        return None if is_open else False
    if is_real:
        return abs(left - right) <= 1e-9 * max(abs(left), abs(right)) or _differ(gold, answer, point) is False
    if left_is_real == right_is_real:
        return None
    # `\sqrt x \sqrt y` and `\sqrt{xy}` differ in their branch, at negative numbers
    is_branch = sum(value < 0 for value in point.values()) > 1 and abs(abs(left) - abs(right)) <= 1e-9 * abs(left)
    return None if is_branch else False


def _fast_value(tree: Node, point: Point) -> tuple[complex | None, bool]:
    """Returns the value in floating point, and whether it and all intermediate values are real."""
    try:
        return _FAST.value(tree, point), _FAST.is_real
    except NoNumber:
        return None, _FAST.is_real


def _differ(gold: Node, answer: Node, point: Point) -> bool | None:
    """Tells whether the values differ at a point; None if one is too large to tell."""
    try:
        left, right, digits = _both(gold, answer, point)
    except NoNumber:
        return None
    return bool(abs(left - right) * 10 ** (digits - 20) > max(abs(left), abs(right)))


def _both(gold: Node, answer: Node, point: Point) -> tuple[Any, Any, int]:
    """Returns both values and the number of significant digits.

    More digits are computed if an intermediate term is large, since cancellation loses them. It raises NoNumber if a
    formula has no value, or a term is too large.
    """
    digits = DIGITS
    while digits <= MAX_DIGITS + 2 * DIGITS:
        evaluator = precise(digits)
        evaluator.largest = 0
        values = evaluator.value(gold, point), evaluator.value(answer, point)
        if evaluator.largest <= digits - DIGITS + 8:
            return *values, max(DIGITS, digits - evaluator.largest)
        digits = DIGITS + 100 * (evaluator.largest // 100 + 1)
    raise NoNumber("too large")


# ----- points


def _points(tree: Node) -> Iterator[Point]:
    """Yields points: all signs and sizes of each variable, sizes around every constant, integers for floors."""
    names = tuple(sorted(symbols(tree)))
    yield from _grid(names)
    rng = random.Random(0)
    sizes = {abs(node[1]) for node in nodes(tree) if node[0] == "number" and 8 < abs(node[1]) < 10**9}
    for size in sorted(sizes)[-MAX_CONSTANTS:]:
        for _ in range(8):
            yield {name: size * Fraction(rng.randrange(-300, 300) | 1, 97) for name in names}
    if any(node[0] == "call" and node[1] in ROUNDED for node in nodes(tree)):
        yield from _integers(tree)


@lru_cache(maxsize=1 << 10)
def _grid(names: tuple[str, ...]) -> tuple[Point, ...]:
    rng = random.Random(repr(names))
    points = []
    for index in range(NUM_POINTS):
        bits = [index >> position & 1 if position < 5 else rng.getrandbits(1) for position in range(len(names))]
        sizes = [rng.choice(_SIZES) * Fraction(rng.randrange(500, 1500), 997) for _ in names]
        points.append({name: (1 - 2 * bit) * size for name, bit, size in zip(names, bits, sizes, strict=True)})
    return tuple(points)


def _integers(tree: Node) -> Iterator[Point]:
    """Points of integers: most of them small, some negative, some large."""
    names = sorted(symbols(tree))
    grows = any(
        node[0] == "fact" or node[1:2] == ("binom",) or (node[0] == "pow" and symbols(node[2])) for node in nodes(tree)
    )
    rng = random.Random(0)
    ranges = [(0, 8 + index) if index % 4 else (0, 150 if grows else 10**4) for index in range(NUM_POINTS)]
    ranges += [(-8 - 4 * index, 4 * index) for index in range(NUM_POINTS // 4)]
    return ({name: Fraction(rng.randrange(*bounds)) for name in names} for bounds in ranges)


def _is_about_integers(gold: Node) -> bool:
    r"""Tells whether the gold answer is for integers only: `(-1)^n`, `\lfloor n/2 \rfloor`, `\cos n\pi`."""
    for node in nodes(gold):
        name = node[1] if node[0] == "call" else node[0]
        is_alternating = name == "pow" and symbols(node[2]) and (literal(node[1]) or 0) < 0
        is_periodic = name in ("sin", "cos", "tan") and ("constant", "pi") in nodes(node)
        is_counted = (name in ROUNDED or is_periodic) and symbols(node) and symbols(node) <= _COUNTERS
        if is_alternating or is_counted or name in ("gcd", "lcm"):
            return True
    return False
