"""The form of a formula: its terms, its factors, its content, its size, and one normal form for all orders."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from grpo_lightning.plugins.rewards.verifier.grammar import Node, per_tree
from grpo_lightning.plugins.rewards.verifier.numbers import literal

ONE: Node = ("one",)
_LARGEST_POWER = 60


def addends(tree: Node, sign: int = 1) -> Iterator[tuple[int, Node]]:
    """Yields the signed terms of a sum, with brackets opened: `a`, `-b`, `c` of `a - (b - c)`."""
    if tree[0] == "add":
        for term in tree[1:]:
            yield from addends(term, sign)
    elif tree[0] == "neg":
        yield from addends(tree[1], -sign)
    else:
        yield sign, tree


def factors(tree: Node) -> tuple[list[Node], list[Node]]:
    """Returns the factors of numerator and denominator, without signs; a finished number is one factor."""
    above: list[Node] = []
    below: list[Node] = []
    pending = [(tree, False)]
    while pending:
        node, is_below = pending.pop()
        if node[0] == "neg":
            pending.append((node[1], is_below))
        elif node[0] == "mul":
            pending += [(factor, is_below) for factor in node[1:]]
        elif node[0] == "div" and (node is tree or literal(node) is None):
            pending += [(node[1], is_below), (node[2], not is_below)]
        else:
            (below if is_below else above).append(node)
    return above, below


def small_integer(tree: Node) -> int | None:
    """Returns the value if it is a small integer, as of an exponent; else None."""
    value = literal(tree)
    return int(value) if value is not None and value.denominator == 1 and abs(value) <= _LARGEST_POWER else None


def is_tree(child: object) -> bool:
    """Tells whether a child of a node is a node itself."""
    return isinstance(child, tuple) and bool(child) and isinstance(child[0], str)


# ----- a formula without its order


@per_tree
def normal(tree: Node, pulls: bool = True) -> tuple[Fraction, Node]:
    r"""Returns a formula as a number times a normal form, equal for all orders of terms: -2, `x - 3` of `6 - 2x`.

    Products stay and like terms are not collected. Equal factors are: `x \cdot x` is `x^2`.
    If `pulls` is False, no number is pulled out of a sum and signs do not count: `2x + 4` is not `2(x + 2)`.
    """
    value = literal(tree)
    if value is not None:
        return value if pulls else abs(value), ONE
    kind = tree[0]
    if kind == "neg":
        number, unscaled = normal(tree[1], pulls)
        return -number if pulls else number, unscaled
    if kind == "add":
        terms = ((sign, *normal(term, pulls)) for sign, term in addends(tree))
        return _sum([(sign * number, unscaled) for sign, number, unscaled in terms], pulls)
    if kind in ("mul", "div"):
        number = Fraction(1)
        powers = dict[Node, Fraction]()
        for child, sign in zip(tree[1:], (1, -1 if kind == "div" else 1), strict=False):
            coefficient, unscaled = normal(child, pulls)
            if not coefficient and sign < 0:
                return Fraction(1), tree
            number *= coefficient**sign
            for base, power in _powers(unscaled):
                powers[base] = powers.get(base, Fraction()) + sign * power
        unscaled = _product(powers)
        if not pulls and unscaled[0] == "sum" and number.denominator > 1:  # `\frac12 (x + 1)` is `\frac x2 + \frac12`
            return _sum([(number * coefficient, child) for coefficient, child in unscaled[1:]], pulls)
        return number, unscaled
    if kind == "root" and (degree := small_integer(tree[1])):
        return _power(tree[2], Fraction(1, degree), pulls)
    if kind == "pow" and (exponent := literal(tree[2])) is not None:
        return _power(tree[1], exponent, pulls)
    return Fraction(1), tuple(("scaled", *normal(child, pulls)) if is_tree(child) else child for child in tree)


def order(tree: Node) -> str:
    """Returns the key by which trees are sorted."""
    try:
        return repr(tree)
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits
        return ""


def _sum(scaled_terms: Sequence[tuple[Fraction, Node]], pulls: bool) -> tuple[Fraction, Node]:
    """Returns the normal form of a sum: its content, and the sorted terms without it."""
    signed = ((number if pulls else abs(number), unscaled) for number, unscaled in scaled_terms if number)
    terms = sorted(signed, key=lambda term: (order(term[1]), term[0]))
    if len(terms) < 2:
        return terms[0] if terms else (Fraction(), ONE)
    denominator = math.lcm(*(number.denominator for number, _ in terms))
    content = Fraction(math.gcd(*(int(number * denominator) for number, _ in terms)), denominator)
    pulled = content if pulls else Fraction(1)
    pulled = pulled if terms[0][0] > 0 else -pulled
    return pulled, ("sum", *((number / pulled, unscaled) for number, unscaled in terms))


def _power(base: Node, exponent: Fraction, pulls: bool) -> tuple[Fraction, Node]:
    """Returns the normal form of a power."""
    number, unscaled = normal(base, pulls)
    if number != 1 and (exponent.denominator > 1 or abs(exponent) > _LARGEST_POWER or not number):
        return Fraction(1), _product({("scaled", number, unscaled): exponent})
    powers = {inner: power * exponent for inner, power in _powers(unscaled)}
    return number ** int(exponent) if number != 1 else number, _product(powers)


def _powers(unscaled: Node) -> tuple[tuple[Node, Fraction], ...]:
    """Returns the bases and exponents of a normal form."""
    if unscaled == ONE:
        return ()
    return unscaled[1:] if unscaled[0] == "product" else ((unscaled, Fraction(1)),)


def _product(powers: dict[Node, Fraction]) -> Node:
    """Returns the normal form of a product of powers, each with its exponent."""
    sorted_powers = sorted(((base, power) for base, power in powers.items() if power), key=order)
    if not sorted_powers:
        return ONE
    base, power = sorted_powers[0]
    return base if len(sorted_powers) == 1 and power == 1 else ("product", *sorted_powers)
