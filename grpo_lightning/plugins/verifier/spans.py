"""Sets of real numbers: intervals, their unions, and the inequalities that describe them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

from grpo_lightning.plugins.verifier.grammar import Node
from grpo_lightning.plugins.verifier.numbers import NoNumber, infinity, precise, symbols

SPANS = frozenset(["numbers", "union", "minus", "meet", "chain", "builder"])
FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
_INFINITY: Node = ("constant", "inf")


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval; a point if both ends are equal and closed."""

    left: Node = ("neg", _INFINITY)
    right: Node = _INFINITY
    left_closed: bool = False
    right_closed: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no number is in it."""
        left, right = _size(self.left), _size(self.right)
        return left > right or (left == right and not (self.left_closed and self.right_closed))


@dataclass(frozen=True, slots=True)
class Span:
    """A union of intervals, from left to right, and the name of its variable."""

    pieces: tuple[Piece, ...]
    name: str = ""

    @property
    def ends(self) -> list[Node]:
        """The ends of all intervals, from left to right."""
        return [end for piece in self.pieces for end in (piece.left, piece.right)]


_LINE = Span((Piece(),))


def union_of(tree: Node) -> Span | None:
    r"""The union of disjoint parts in a list: `x<2, x>3` or `(-\infty,2), (3,\infty)`; None for others."""
    spans = _spans(tree[1:])
    if not spans or (tree[0] == "both" and any(part[0] == "chain" for part in tree[1:])):
        return None
    total = _union(*spans)
    return total if len(total.pieces) == sum(len(span.pieces) for span in spans) else None


def _spans(trees: Sequence[Node]) -> list[Span]:
    """The spans of all trees; none if one of them has none, or they have different variables."""
    spans = [span for tree in trees if (span := span_of(tree))]
    return spans if len(spans) == len(trees) and len({span.name for span in spans}) == 1 else []


def is_only_span(tree: Node) -> bool:
    """Whether a tree can only be a set of numbers, as a half-open interval can, and one with an infinite end."""
    if tree[0] in ("list", "or", "both"):
        return any(part[0] == "chain" for part in tree[1:])
    is_open = tree[1:3] in (("[", ")"), ("(", "]"))
    return tree[0] in SPANS or (tree[0] == "group" and (is_open or any(infinity(part) for part in tree[3:])))


@lru_cache(maxsize=1 << 12)
def span_of(tree: Node) -> Span | None:
    """The set of real numbers that a tree describes; None if it describes none."""
    kind, parts = tree[0], tree[1:]
    if kind == "chain":
        return _span_of_chain(tree)
    if kind == "group" and len(tree) == 5:
        return _interval(Piece(tree[3], tree[4], tree[1] == "[", tree[2] == "]"))
    if kind in ("or", "either"):
        return union_of(tree)
    if kind in ("list", "both") and all(part[0] == "chain" for part in parts):
        spans = _spans(parts)
        return reduce(_meet, spans) if spans else None
    if kind == "numbers":
        return _LINE if parts == ("R",) else None
    if kind == "set" and all(_size(part) is not None for part in parts):
        return _union(*(_point(part) for part in parts))
    if kind == "builder" and parts[0][0] in ("symbol", "chain"):
        bodies = parts if parts[0][0] == "chain" else parts[1:]
        spans = [span for part in bodies if (span := span_of(part))]
        return replace(reduce(_meet, spans, _LINE), name="") if len(spans) == len(bodies) else None
    if kind in ("union", "meet", "minus"):
        left, right = map(span_of, parts)
        if left and right:
            return _union(left, right) if kind == "union" else _meet(left, right if kind == "meet" else _outside(right))
    return None


def _span_of_chain(tree: Node) -> Span | None:
    _, operators, operands = tree
    if not operators:
        return span_of(operands[0])
    if operands[0][0] == "abs" and operands[0][1][0] == "symbol" and len(operands) == 2 and operators[0] in FLIPPED:
        name, end = operands[0][1], operands[1]  # `|x| < 3`
        other = ("chain", (FLIPPED[operators[0]],), (name, ("neg", end)))
        return span_of(("both" if operators[0] in ("<", "le") else "either", ("chain", operators, (name, end)), other))
    names = [index for index, operand in enumerate(operands) if operand[0] == "symbol"]
    if len(names) != 1 or any(symbols(operand) for operand in operands if operand[0] != "symbol"):
        return None
    (position,) = names
    name = operands[position][1]
    if operators == ("in",) and position == 0:
        span = span_of(operands[1])
        return Span(span.pieces, name) if span else None
    if len(operands) > 3 or (len(operands) == 3 and position != 1):
        return None
    total = _LINE
    for index, operator in enumerate(operators):
        is_left = index < position
        side = _side(FLIPPED.get(operator, operator) if is_left else operator, operands[index + (not is_left)])
        if side is None:
            return None
        total = _meet(total, side)
    return Span(total.pieces, name) if total.pieces else None


def _side(operator: str, bound: Node) -> Span | None:
    """The numbers x with `x < bound`, or another relation."""
    if operator in ("<", "le"):
        return _interval(Piece(right=bound, right_closed=operator == "le"))
    if operator in (">", "ge"):
        return _interval(Piece(left=bound, left_closed=operator == "ge"))
    if operator not in ("=", "ne") or _size(bound) is None:
        return None
    return _point(bound) if operator == "=" else _outside(_point(bound))


@lru_cache(maxsize=1 << 12)
def _size(tree: Node) -> Any:
    """The value of a number to 45 digits; None if it is not real."""
    context = precise(45).context
    if infinity(tree):
        return context.inf * infinity(tree)
    try:
        value = precise(45).value(tree, {})
    except (NoNumber, KeyError):
        return None
    return context.re(value) if abs(context.im(value)) < 1e-30 else None


def _point(value: Node) -> Span:
    return Span((Piece(value, value, True, True),))


def _interval(piece: Piece) -> Span | None:
    """The span of an interval; None if its ends are no numbers, or infinite ones in square brackets."""
    is_infinite_end = (piece.left_closed and infinity(piece.left)) or (piece.right_closed and infinity(piece.right))
    if None in (_size(piece.left), _size(piece.right)) or is_infinite_end or piece.is_empty:
        return None
    return Span((piece,))


def _union(*spans: Span) -> Span:
    """All pieces from left to right, with touching ones joined."""
    pieces = [piece for span in spans for piece in span.pieces]
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (_size(piece.left), not piece.left_closed)):
        last = merged[-1] if merged else piece
        gap = _size(piece.left) - _size(last.right) if merged else 1
        if gap < 0 or (gap == 0 and (piece.left_closed or last.right_closed)):
            end = max((last, piece), key=lambda p: (_size(p.right), p.right_closed))
            merged[-1] = replace(last, right=end.right, right_closed=end.right_closed)
        else:
            merged.append(piece)
    return Span(tuple(merged), next((span.name for span in spans if span.name), ""))


def _outside(span: Span) -> Span:
    """All other real numbers."""
    pieces, rest = [], Piece()
    for piece in span.pieces:
        pieces.append(replace(rest, right=piece.left, right_closed=not piece.left_closed))
        rest = Piece(left=piece.right, left_closed=not piece.right_closed)
    return Span(tuple(piece for piece in (*pieces, rest) if not piece.is_empty), span.name)


def _meet(left: Span, right: Span) -> Span:
    """The numbers in both: those that are not outside of one."""
    return replace(_outside(_union(_outside(left), _outside(right))), name=left.name or right.name)
