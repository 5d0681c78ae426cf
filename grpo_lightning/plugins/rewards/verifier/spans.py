"""Sets of real numbers: intervals, their unions, and the inequalities that describe them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import groupby, pairwise
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import Any

from grpo_lightning.plugins.rewards.verifier.grammar import Node
from grpo_lightning.plugins.rewards.verifier.numbers import NoNumber, infinity, precise
from grpo_lightning.plugins.rewards.verifier.words import word_set

SPANS = word_set("numbers union minus meet chain builder")
FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
_INFINITY: Node = ("constant", "inf")
_TESTS: dict[str, Callable[[Any, Any], bool]] = {"<": lt, ">": gt, "le": le, "ge": ge, "=": eq, "ne": ne}
Piece = tuple[Node, Node, bool, bool]
"""An interval: both ends, and whether each of them belongs to it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A set of real numbers."""

    has: Callable[[Any], bool]
    """Tells whether a number is in the set."""
    ends: tuple[Node, ...] = ()
    """All ends that its intervals may have."""
    name: str = ""
    """The name of its variable, if it has one."""

    @property
    def pieces(self) -> list[Piece]:
        """The intervals, from left to right."""
        # The set is known by its ends, a number between each two neighbours, and one beyond the outer ends.
        finite = {precise(30).context.nstr(_size(end), 30): end for end in self.ends if not infinity(end)}
        ends = sorted(finite.values(), key=_size)
        sizes = [_size(end) for end in ends]
        gaps = [(a + b) / 2 for a, b in pairwise(sizes)]
        gaps = [sizes[0] - 1, *gaps, sizes[-1] + 1] if sizes else [0]
        probes = [probe for pair in zip(gaps, [*sizes, 0], strict=True) for probe in pair][:-1]

        # An interval is a run of probes in the set. Probes with odd indices are ends.
        bounds = [("neg", _INFINITY), *ends, _INFINITY]
        intervals = []
        for is_in, run in groupby(range(len(probes)), key=lambda index: self.has(probes[index])):
            first, *_, last = [*run] * 2
            intervals += [(bounds[(first + 1) // 2], bounds[last // 2 + 1], first % 2 == 1, last % 2 == 1)] * is_in
        return intervals


LINE = Span(lambda x: True)


def union_of(tree: Node) -> Span | None:
    r"""Returns the union of disjoint parts in a list: `x<2, x>3` or `(-\infty,2), (3,\infty)`; None for others."""
    spans = _spans(tree[1:])
    if not spans or (tree[0] == "both" and any(member[0] == "chain" for member in tree[1:])):
        return None
    total = reduce(_union, spans)
    return total if len(total.pieces) == sum(len(span.pieces) for span in spans) else None


def _spans(trees: Sequence[Node]) -> list[Span]:
    """Returns the spans of all trees; none if one of them has none, or they have different variables."""
    spans = [span for tree in trees if (span := span_of(tree))]
    return spans if len(spans) == len(trees) and len({span.name for span in spans}) == 1 else []


def is_only_span(tree: Node) -> bool:
    """Tells whether a tree can only be a set of numbers, as a half-open interval can, and one with an infinite end."""
    if tree[0] in ("list", "or", "both"):
        return any(child[0] == "chain" for child in tree[1:])
    is_open = tree[1:3] in (("[", ")"), ("(", "]"))
    return tree[0] in SPANS or (tree[0] == "group" and (is_open or any(infinity(child) for child in tree[3:])))


@lru_cache(maxsize=1 << 12)
def span_of(tree: Node) -> Span | None:
    """Returns the set of real numbers that a tree describes; None if it describes none."""
    kind, *children = tree
    if kind == "chain":
        return _span_of_chain(*children)
    if kind == "group" and len(tree) == 5:
        return _interval(tree)
    if kind in ("or", "either"):
        return union_of(tree)
    if kind in ("list", "both") and all(child[0] == "chain" for child in children):
        return reduce(_meet, spans) if (spans := _spans(children)) else None
    if tree == ("numbers", "R"):
        return LINE
    if kind == "set" and all(_size(child) is not None for child in children):
        sizes = [_size(child) for child in children]
        return Span(lambda x: x in sizes, tuple(children))
    if kind == "builder" and children[0][0] in ("symbol", "chain"):
        bodies = children if children[0][0] == "chain" else children[1:]
        spans = [span for child in bodies if (span := span_of(child))]
        return replace(reduce(_meet, spans, LINE), name="") if len(spans) == len(bodies) else None
    if kind in ("union", "meet", "minus"):
        left, right = map(span_of, children)
        if left and right:
            return {"union": _union, "meet": _meet, "minus": minus}[kind](left, right)
    return None


def _span_of_chain(operators: tuple[str, ...], operands: tuple[Node, ...]) -> Span | None:
    if not operators:
        return span_of(operands[0])
    total = LINE
    names = set()
    for left, operator, right in zip(operands, operators, operands[1:], strict=False):
        if left[0] != "symbol":
            left, right = right, left
            operator = FLIPPED.get(operator, operator)
        side = span_of(right) if operator == "in" else _side(operator, right)
        if left[0] != "symbol" or side is None or (operator == "ne" and len(operators) > 1):
            return None
        total = _meet(total, side)
        names.add(left[1])
    return replace(total, name=names.pop()) if len(names) == 1 and total.pieces else None


def _side(operator: str, end: Node) -> Span | None:
    """Returns the numbers x with `x < end`, or another relation."""
    size = _size(end)
    test = _TESTS.get(operator)
    is_no_end = size is None or (infinity(end) and operator not in ("<", ">"))
    return None if test is None or is_no_end else Span(lambda x: test(x, size), (end,))


def _interval(tree: Node) -> Span | None:
    """Returns the span of an interval; None if its ends are no numbers, or infinite ones in square brackets."""
    _, opening, closing, left, right = tree
    sides = _side("ge" if opening == "[" else ">", left), _side("le" if closing == "]" else "<", right)
    span = _meet(sides[0], sides[1]) if sides[0] and sides[1] else None
    return span if span and _size(left) <= _size(right) and span.pieces else None


@lru_cache(maxsize=1 << 12)
def _size(tree: Node) -> Any:
    """Returns the value of a number to 45 digits; None if it is not real."""
    evaluator = precise(45)
    context = evaluator.context
    if infinity(tree):
        return context.inf * infinity(tree)
    try:
        value = evaluator.value(tree, {})
    except NoNumber:
        return None
    return context.re(value) if abs(context.im(value)) < 1e-30 else None


def _combined(has: Callable[[bool, bool], bool]) -> Callable[[Span, Span], Span]:
    """Returns an operation on two sets, whose result has a number if `has` of whether each set has it is true."""

    def combine(left: Span, right: Span) -> Span:
        return Span(lambda x: has(left.has(x), right.has(x)), left.ends + right.ends, left.name or right.name)

    return combine


_union, _meet, minus = map(_combined, (or_, and_, gt))
