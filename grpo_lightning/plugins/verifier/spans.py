"""Sets of real numbers: intervals, their unions, and the inequalities that describe them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_lightning.plugins.verifier.grammar import Claim, Node
from grpo_lightning.plugins.verifier.numbers import NoNumber, infinity, is_infinite, precise, symbols

SPANS = frozenset(["numbers", "union", "minus", "meet", "chain", "builder"])
FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval; a point if both ends are equal and closed."""

    left: Node
    right: Node
    left_closed: bool
    right_closed: bool


@dataclass(frozen=True, slots=True)
class Span:
    """A union of intervals, from left to right, and the name of its variable."""

    pieces: tuple[Piece, ...]
    name: str = ""

    @property
    def ends(self) -> list[Node]:
        """The ends of all intervals, from left to right."""
        return [end for piece in self.pieces for end in (piece.left, piece.right)]


_INFINITY: Node = ("constant", "inf")
_LINE = Piece(("neg", _INFINITY), _INFINITY, False, False)


def span_of_claim(claim: Claim) -> Span | None:
    r"""The set that the items describe together: `x < -2 \text{ or } x > 5`, `x > 1, x < 2`; None for others."""
    spans = [span_of(item.chain) for item in claim.items]
    known = [span for span in spans if span]
    if len(known) < len(spans) or len({span.name for span in known}) > 1:
        return None
    is_list = ";" in claim.joins or not all(item.chain[1] for item in claim.items)
    if len(known) > 1 and "or" not in claim.joins and is_list:
        return None  # a list of sets
    if "or" in claim.joins:
        return _disjoint_union(known)
    total = known[0]
    for span in known[1:]:
        total = _meet(total, span)
    return total


def union_of_claim(claim: Claim) -> Span | None:
    r"""The union of disjoint parts in a list: `x<2, x>3` or `(-\infty,2), (3,\infty)`; None for others."""
    spans = [span for item in claim.items if (span := span_of(item.chain))]
    is_union = 1 < len(spans) == len(claim.items) and not claim.joins - {",", ";", "and"}
    are_sets = all(not item.chain[1] or item.chain[1] == ("in",) for item in claim.items)
    if not is_union or len({span.name for span in spans}) > 1 or ("and" in claim.joins and not are_sets):
        return None
    return _disjoint_union(spans)


def _disjoint_union(spans: Sequence[Span]) -> Span | None:
    """The union; None if the spans overlap: they are two answers, not one in two parts."""
    total = spans[0]
    for span in spans[1:]:
        total = _union(total, span)
    return total if len(total.pieces) == sum(len(span.pieces) for span in spans) else None


def is_span(claim: Claim) -> bool:
    """Whether the claim can only be a set of real numbers, not a tuple or a number."""
    for item in claim.items:
        _, operators, operands = item.chain
        if set(operators) - {"=", "approx", "in"} or operands[-1][0] in SPANS or is_interval(operands[-1]):
            return True
    return False


def is_interval(tree: Node) -> bool:
    """Whether a group can only be an interval: half-open, or with an infinite end."""
    return tree[0] == "group" and (tree[1:3] in (("[", ")"), ("(", "]")) or any(is_infinite(part) for part in tree[3:]))


@lru_cache(maxsize=1 << 12)
def span_of(tree: Node) -> Span | None:
    """The set of real numbers that a tree describes; None if it describes none."""
    kind = tree[0]
    if kind == "chain":
        return _span_of_chain(tree)
    if kind == "group" and len(tree) == 5:
        return _interval(tree[3], tree[4], tree[1] == "[", tree[2] == "]")
    if kind == "either":
        parts = [span_of(part) for part in tree[1:]]
        pieces = [piece for part in parts if part for piece in part.pieces]
        names = {part.name for part in parts if part}
        return _tidy(pieces, names.pop()) if all(parts) and len(names) == 1 else None
    if kind == "numbers":
        return Span((_LINE,)) if tree[1] == "R" else None
    if kind == "set":
        pieces = [Piece(part, part, True, True) for part in tree[1:]]
        return _tidy(pieces) if all(_size(part) is not None for part in tree[1:]) else None
    if kind == "builder" and tree[1][0] in ("symbol", "chain"):
        total: Span | None = Span((_LINE,))
        bodies = [tree[1]] if tree[1][0] == "chain" else []
        for part in (*bodies, *tree[2:]):
            span = span_of(part)
            total = _meet(total, span) if total and span else None
        return Span(total.pieces) if total else None
    if kind in ("union", "meet", "minus"):
        left, right = span_of(tree[1]), span_of(tree[2])
        if left is None or right is None:
            return None
        return _union(left, right) if kind == "union" else _meet(left, right if kind == "meet" else _outside(right))
    return None


def _span_of_chain(tree: Node) -> Span | None:
    _, operators, operands = tree
    if not operators:
        return span_of(operands[0])
    if operators == ("in",) and operands[0][0] == "symbol":
        span = span_of(operands[1])
        return Span(span.pieces, operands[0][1]) if span else None
    positions = [index for index, operand in enumerate(operands) if operand[0] == "symbol"]
    if len(positions) != 1 or any(symbols(operand) for operand in operands if operand[0] != "symbol"):
        return None
    (position,) = positions
    if len(operands) > 3 or (len(operands) == 3 and position != 1):
        return None
    total: Span | None = Span((_LINE,))
    for index, operator in enumerate(operators):
        bound = operands[index] if index < position else operands[index + 1]
        if index < position:
            operator = FLIPPED.get(operator, operator)
        total = _meet(total, span) if total and (span := _side(operator, bound)) else None
    return Span(total.pieces, operands[position][1]) if total and total.pieces else None


def _side(operator: str, bound: Node) -> Span | None:
    if operator == "<" or operator == "le":
        return _interval(_LINE.left, bound, False, operator == "le")
    if operator == ">" or operator == "ge":
        return _interval(bound, _INFINITY, operator == "ge", False)
    if operator in ("=", "ne") and _size(bound) is not None:
        point = Span((Piece(bound, bound, True, True),))
        return point if operator == "=" else _outside(point)
    return None


@lru_cache(maxsize=1 << 12)
def _size(tree: Node) -> Any:
    """The value of a number to 45 digits; None if it is not real."""
    if is_infinite(tree):
        return precise(45).context.inf * infinity(tree)
    try:
        value = precise(45).value(tree, {})
    except (NoNumber, KeyError):
        return None
    context = precise(45).context
    return context.re(value) if abs(context.im(value)) < 1e-30 else None


def _interval(left: Node, right: Node, left_closed: bool, right_closed: bool) -> Span | None:
    sizes = _size(left), _size(right)
    if None in sizes or sizes[0] > sizes[1]:
        return None
    ends_meet = sizes[0] == sizes[1] and not (left_closed and right_closed)
    closed = left_closed and not is_infinite(left), right_closed and not is_infinite(right)
    if ends_meet or closed != (left_closed, right_closed):
        return None
    return Span((Piece(left, right, *closed),))


def _tidy(pieces: Sequence[Piece], name: str = "") -> Span:
    """The pieces from left to right, with touching ones joined."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (_size(piece.left), not piece.left_closed)):
        last = merged[-1] if merged else None
        if last and (
            _size(piece.left) < _size(last.right)
            or (_size(piece.left) == _size(last.right) and (piece.left_closed or last.right_closed))
        ):
            right = max((last, piece), key=lambda p: (_size(p.right), p.right_closed))
            merged[-1] = Piece(last.left, right.right, last.left_closed, right.right_closed)
        else:
            merged.append(piece)
    return Span(tuple(merged), name)


def _union(left: Span, right: Span) -> Span:
    return _tidy([*left.pieces, *right.pieces], left.name or right.name)


def _meet(left: Span, right: Span) -> Span:
    found = []
    for a in left.pieces:
        for b in right.pieces:
            low = max((a, b), key=lambda p: (_size(p.left), not p.left_closed))
            high = min((a, b), key=lambda p: (_size(p.right), p.right_closed))
            gap = _size(high.right) - _size(low.left)
            if gap > 0 or (gap == 0 and low.left_closed and high.right_closed):
                found.append(Piece(low.left, high.right, low.left_closed, high.right_closed))
    return _tidy(found, left.name or right.name)


def _outside(span: Span) -> Span:
    total = Span((_LINE,), span.name)
    for piece in span.pieces:
        rest = []
        if not is_infinite(piece.left):
            rest.append(Piece(_LINE.left, piece.left, False, not piece.left_closed))
        if not is_infinite(piece.right):
            rest.append(Piece(piece.right, _INFINITY, not piece.right_closed, False))
        total = _meet(total, Span(tuple(rest)))
    return total
