"""The form of a formula: its terms, its factors, its content, its size, and one normal form for all orders."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from grpo_lightning.plugins.verifier.grammar import Node
from grpo_lightning.plugins.verifier.numbers import literal, symbols

ONE: Node = ("one",)
_LARGEST_POWER = 60


def addends(tree: Node, sign: int = 1) -> Iterator[tuple[int, Node]]:
    """Yields the signed terms of a sum, with brackets opened: `a`, `-b`, `c` of `a - (b - c)`."""
    if tree[0] == "add":
        for part in tree[1:]:
            yield from addends(part, sign)
    elif tree[0] == "neg":
        yield from addends(tree[1], -sign)
    else:
        yield sign, tree


def factors(tree: Node) -> tuple[list[Node], list[Node]]:
    """The factors of numerator and denominator, without signs; a finished number is one factor."""
    above: list[Node] = []
    below: list[Node] = []
    pending = [(tree, False)]
    while pending:
        node, is_below = pending.pop()
        if node[0] == "neg":
            pending.append((node[1], is_below))
        elif node[0] == "mul":
            pending += [(part, is_below) for part in node[1:]]
        elif node[0] == "div" and (node is tree or literal(node) is None):
            pending += [(node[1], is_below), (node[2], not is_below)]
        elif node[0] == "pow" and (power := literal(node[2]) or 0) < 0 and symbols(node[1]):
            pending.append((("pow", node[1], ("number", -power, None)) if power != -1 else node[1], not is_below))
        else:
            (below if is_below else above).append(node)
    return above, below


def whole(tree: Node) -> int | None:
    """The value if it is a small integer, as of an exponent; else None."""
    value = literal(tree)
    return int(value) if value is not None and value.denominator == 1 and abs(value) <= _LARGEST_POWER else None


def is_tree(part: object) -> bool:
    """Whether a part of a node is a node itself."""
    return isinstance(part, tuple) and bool(part) and isinstance(part[0], str)


# ----- a formula without its order


@lru_cache(maxsize=1 << 13)
def normal(tree: Node, pulls: bool = True) -> tuple[Fraction, Node]:
    r"""A formula as a number times the rest, the same for all orders of terms and factors: -2, `x - 3` of `6 - 2x`.

    Products stay and like terms are not collected. Equal factors are: `x \cdot x` is `x^2`.
    If `pulls` is False, no number is pulled out of a sum and signs do not count: `2x + 4` is not `2(x + 2)`.
    """
    value = literal(tree)
    if value is not None:
        return value if pulls else abs(value), ONE
    kind = tree[0]
    if kind == "neg":
        number, rest = normal(tree[1], pulls)
        return -number if pulls else number, rest
    if kind == "add":
        terms = ((sign, *normal(term, pulls)) for sign, term in addends(tree))
        return _sum([(sign * number, rest) for sign, number, rest in terms], pulls)
    if kind in ("mul", "div"):
        number, powers = Fraction(1), dict[Node, Fraction]()
        for part, sign in zip(tree[1:], (1, -1 if kind == "div" else 1), strict=False):
            own, rest = normal(part, pulls)
            if not own and sign < 0:
                return Fraction(1), tree
            number *= own**sign
            for base, power in _powers(rest):
                powers[base] = powers.get(base, Fraction()) + sign * power
        rest = _product(powers)
        if not pulls and rest[0] == "sum" and number.denominator > 1:  # `\frac12 (x + 1)` is `\frac x2 + \frac12`
            return _sum([(number * own, part) for own, part in rest[1:]], pulls)
        return number, rest
    if kind == "root" and (degree := whole(tree[1])):
        return _power(tree[2], Fraction(1, degree), pulls)
    if kind == "pow" and (exponent := literal(tree[2])) is not None:
        return _power(tree[1], exponent, pulls)
    return Fraction(1), tuple(("scaled", *normal(part, pulls)) if is_tree(part) else part for part in tree)


def order(tree: Node) -> str:
    """The key by which trees are sorted."""
    try:
        return repr(tree)
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits
        return ""


def _sum(parts: Sequence[tuple[Fraction, Node]], pulls: bool) -> tuple[Fraction, Node]:
    signed = ((number if pulls else abs(number), rest) for number, rest in parts if number)
    kept = sorted(signed, key=lambda part: (order(part[1]), part[0]))
    if len(kept) < 2:
        return kept[0] if kept else (Fraction(), ONE)
    below = math.lcm(*(number.denominator for number, _ in kept))
    pulled = Fraction(math.gcd(*(int(number * below) for number, _ in kept)), below) if pulls else Fraction(1)
    pulled = pulled if kept[0][0] > 0 else -pulled
    return pulled, ("sum", *((number / pulled, rest) for number, rest in kept))


def _power(base: Node, exponent: Fraction, pulls: bool) -> tuple[Fraction, Node]:
    number, rest = normal(base, pulls)
    if number != 1 and (exponent.denominator > 1 or abs(exponent) > _LARGEST_POWER or not number):
        return Fraction(1), _product({("scaled", number, rest): exponent})
    powers = {inner: power * exponent for inner, power in _powers(rest)}
    return number ** int(exponent) if number != 1 else number, _product(powers)


def _powers(rest: Node) -> tuple[tuple[Node, Fraction], ...]:
    if rest == ONE:
        return ()
    return rest[1:] if rest[0] == "product" else ((rest, Fraction(1)),)


def _product(powers: dict[Node, Fraction]) -> Node:
    kept = sorted(((base, power) for base, power in powers.items() if power), key=order)
    if not kept:
        return ONE
    return kept[0][0] if len(kept) == 1 and kept[0][1] == 1 else ("product", *kept)
