"""The form of a formula: its terms, its factors, its content and its size."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product
from zlib import crc32

from grpo_lightning.plugins.verifier.grammar import Node
from grpo_lightning.plugins.verifier.numbers import literal, nodes, symbols

ONE: Node = ("one",)
_LARGEST_POWER = 60


def addends(tree: Node, sign: int = 1) -> Iterator[tuple[int, Node]]:
    """Yields the signed terms of a sum, with brackets opened: `a`, `-b`, `c` of `a - (b - c)`."""
    if tree[0] == "add":
        for part in tree[1:]:
            yield from addends(part, sign)
    elif tree[0] == "neg" and tree[1][0] in ("add", "neg"):
        yield from addends(tree[1], -sign)
    elif tree[0] == "neg":
        yield -sign, tree[1]
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


def content(tree: Node) -> Fraction:
    """The largest positive number that divides all terms: 2 of `4x - 6`."""
    value = literal(tree)
    if value is not None:
        return abs(value) or Fraction(1)
    if tree[0] in ("neg", "add"):
        parts = [content(term) for _, term in addends(tree)]
        below = math.lcm(*(part.denominator for part in parts))
        return Fraction(math.gcd(*(int(part * below) for part in parts)), below)
    if tree[0] in ("pm", "degree"):
        return content(tree[-1])
    if tree[0] == "mul":
        return math.prod((content(part) for part in tree[1:]), start=Fraction(1))
    if tree[0] == "div":
        return content(tree[1]) / content(tree[2])
    if tree[0] == "pow" and (power := whole(tree[2])) is not None:
        return content(tree[1]) ** power
    return Fraction(1)


def whole(tree: Node) -> int | None:
    """The value if it is a small integer, as of an exponent; else None."""
    value = literal(tree)
    return int(value) if value is not None and value.denominator == 1 and abs(value) <= _LARGEST_POWER else None


def size(tree: Node) -> int:
    """The number of operations, variables and numbers of a formula; signs and brackets do not count."""
    if literal(tree) is not None or tree[0] in ("symbol", "constant"):
        return 1
    if tree[0] in ("neg", "pm"):
        return size(tree[-1])
    if tree[0] == "root":
        return 1 + size(tree[2])
    if tree[0] == "add":
        sizes = [size(term) for _, term in addends(tree) if literal(term) != 0]
        return sum(sizes) + (len(sizes) > 1)
    return 1 + sum(size(part) for part in tree[1:] if isinstance(part, tuple) and part and isinstance(part[0], str))


def is_expanded(tree: Node) -> bool:
    """Whether the tree is a sum of numbers times powers of variables."""
    for _, term in addends(tree):
        above, below = factors(term)
        if any(literal(factor) is None for factor in below):
            return False
        for factor in above:
            base = factor[1] if factor[0] == "pow" and (whole(factor[2]) or 0) > 0 else factor
            if literal(factor) is None and base[0] != "symbol":
                return False
    return True


# ----- a formula without its order, signs and numbers


@lru_cache(maxsize=1 << 13)
def split(tree: Node) -> tuple[Fraction, Node]:
    r"""A formula as a number times the rest, the same for all orders of terms and factors: -2, `x - 3` of `6 - 2x`.

    Products stay and like terms are not collected. Equal factors are: `x \cdot x` is `x^2`.
    """
    value = literal(tree)
    if value is not None:
        return value, ONE
    kind = tree[0]
    if kind == "neg":
        number, rest = split(tree[1])
        return -number, rest
    if kind == "add":
        return _split_sum(tree)
    if kind in ("mul", "div"):
        number, powers = Fraction(1), dict[Node, Fraction]()
        for part, sign in zip(tree[1:], (1, -1 if kind == "div" else 1), strict=False):
            own, rest = split(part)
            if not own and sign < 0:
                return Fraction(1), tree
            number *= own**sign
            for base, power in _powers(rest):
                powers[base] = powers.get(base, Fraction()) + sign * power
        return number, _product(powers)
    if kind == "root" and (degree := whole(tree[1])):
        return _split_power(tree[2], Fraction(1, degree))
    if kind == "pow" and (exponent := literal(tree[2])) is not None:
        return _split_power(tree[1], exponent)
    if kind == "call" and tree[1] == "exp":
        return split(("pow", ("constant", "e"), tree[2]))
    return Fraction(1), tuple(
        ("scaled", *split(part)) if isinstance(part, tuple) and part and isinstance(part[0], str) else part
        for part in tree
    )


def order(tree: Node) -> str:
    """The key by which trees are sorted."""
    try:
        return repr(tree)
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits
        return ""


def _split_sum(tree: Node) -> tuple[Fraction, Node]:
    parts = [(sign * number, rest) for sign, term in addends(tree) for number, rest in [split(term)] if number]
    parts.sort(key=lambda part: (order(part[1]), part[0]))
    if len(parts) < 2:
        return parts[0] if parts else (Fraction(), ONE)
    below = math.lcm(*(number.denominator for number, _ in parts))
    pulled = Fraction(math.gcd(*(int(number * below) for number, _ in parts)), below)
    pulled = pulled if parts[0][0] > 0 else -pulled
    return pulled, ("sum", *((number / pulled, rest) for number, rest in parts))


def _split_power(base: Node, exponent: Fraction) -> tuple[Fraction, Node]:
    number, rest = split(base)
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


# ----- polynomials multiplied out

_MAX_TERMS = 60


def monomials(tree: Node) -> frozenset[Node]:
    """The powers of variables of an expanded polynomial, without the constant; empty for others and long ones."""
    return frozenset(_expanded(tree) or ()) - {()}


def _expanded(tree: Node) -> dict[Node, Fraction] | None:
    if literal(tree) is not None:
        return {(): literal(tree) or Fraction()}
    kind = tree[0]
    if kind == "neg":
        return _expanded(tree[1])
    if kind == "add":
        total: dict[Node, Fraction] = {}
        for sign, term in addends(tree):
            for name, number in (_expanded(term) or {}).items():
                total[name] = total.get(name, Fraction()) + sign * number
        return {name: number for name, number in total.items() if number} if len(total) <= _MAX_TERMS else None
    if kind == "mul" or (kind == "pow" and 0 < (whole(tree[2]) or 0) < 10):
        result: dict[Node, Fraction] = {(): Fraction(1)}
        for part in tree[1:] if kind == "mul" else [tree[1]] * (whole(tree[2]) or 0):
            other = _expanded(part)
            if other is None or len(result) * len(other) > _MAX_TERMS:
                return None
            result = _multiplied_out(result, other)
        return result
    if kind == "div" and literal(tree[2]):
        return _expanded(tree[1])
    return {((split(tree)[1], 1),): Fraction(1)} if symbols(tree) else {(): Fraction(1)}


def _multiplied_out(left: dict[Node, Fraction], right: dict[Node, Fraction]) -> dict[Node, Fraction]:
    result: dict[Node, Fraction] = {}
    for (a, x), (b, y) in product(left.items(), right.items()):
        powers = dict(a)
        for base, power in b:
            powers[base] = powers.get(base, 0) + power
        name = tuple(sorted(powers.items(), key=order))
        result[name] = result.get(name, Fraction()) + x * y
    return {name: number for name, number in result.items() if number}


# ----- common factors of polynomials

_PRIME = (1 << 61) - 1
_MAX_DEGREE = 40


def have_common_factor(above: Sequence[Node], below: Sequence[Node]) -> bool:
    """Whether two products of polynomials have a common factor that is no number.

    All variables but one are replaced by fixed random numbers. The greatest common divisor is computed modulo a prime.
    A subtree that is no polynomial counts as a variable.
    """
    shared = {atom for part in above for atom in _atoms(part)} & {atom for part in below for atom in _atoms(part)}
    return any(_degree_of_gcd(_times(above, atom), _times(below, atom)) > 0 for atom in sorted(shared, key=repr)[:8])


def _atoms(tree: Node) -> Iterator[Node]:
    if tree[0] in ("add", "mul", "neg"):
        for part in tree[1:]:
            yield from _atoms(part)
    elif (tree[0] == "div" and literal(tree[2])) or (tree[0] == "pow" and 0 < (whole(tree[2]) or 0) <= _MAX_DEGREE):
        yield from _atoms(tree[1])
    elif tree[0] != "number":
        yield tree


def _times(parts: Sequence[Node], atom: Node) -> list[int]:
    result = [1]
    for part in parts:
        result = _multiplied(result, _polynomial(part, atom))
    return result


def _polynomial(tree: Node, atom: Node) -> list[int]:
    """The coefficients modulo the prime, the constant first; nothing if the degree is too large."""
    if tree == atom:
        return [0, 1]
    kind = tree[0]
    if kind == "number":
        return _trimmed([tree[1].numerator * pow(tree[1].denominator, -1, _PRIME) % _PRIME])
    if kind == "neg":
        return [-value % _PRIME for value in _polynomial(tree[1], atom)]
    if kind == "add":
        parts = [_polynomial(part, atom) for part in tree[1:]]
        long = max(map(len, parts))
        return _trimmed([sum(part[index] for part in parts if index < len(part)) % _PRIME for index in range(long)])
    if kind == "mul":
        return _times(tree[1:], atom)
    if kind == "div" and (below := literal(tree[2])):
        inverse = below.denominator * pow(below.numerator, -1, _PRIME) % _PRIME
        return [value * inverse % _PRIME for value in _polynomial(tree[1], atom)]
    if kind == "pow" and 0 < (power := whole(tree[2]) or 0) <= _MAX_DEGREE:
        return _times([tree[1]] * power, atom)
    return [crc32(repr(tree).encode()) * 2654435761 % _PRIME + 1]


def _multiplied(left: list[int], right: list[int]) -> list[int]:
    if not left or not right or len(left) + len(right) > 2 * _MAX_DEGREE:
        return []
    result = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            result[i + j] = (result[i + j] + a * b) % _PRIME
    return _trimmed(result)


def _trimmed(values: list[int]) -> list[int]:
    while values and not values[-1]:
        values.pop()
    return values


def _degree_of_gcd(left: list[int], right: list[int]) -> int:
    if not left or not right:
        return 0
    while right:
        inverse = pow(right[-1], -1, _PRIME)
        rest = list(left)
        while len(rest) >= len(right):
            factor, shift = rest[-1] * inverse % _PRIME, len(rest) - len(right)
            for index, value in enumerate(right):
                rest[shift + index] = (rest[shift + index] - factor * value) % _PRIME
            _trimmed(rest)
        left, right = right, rest
    return len(left) - 1


def has_node(tree: Node, node: Node) -> bool:
    """Whether the tree contains the node."""
    return any(part == node for part in nodes(tree))
