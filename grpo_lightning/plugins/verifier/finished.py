r"""Tells whether an answer is in finished form: `8\sqrt2` is, `\sqrt{50}+\sqrt{18}` and `2x+3x` are not."""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from grpo_lightning.plugins.verifier.forms import (
    ONE,
    addends,
    content,
    factors,
    have_common_factor,
    monomials,
    normal,
)
from grpo_lightning.plugins.verifier.grammar import Node
from grpo_lightning.plugins.verifier.numbers import NoNumber, exact, literal, nodes, precise, symbols
from grpo_lightning.plugins.verifier.rules import rule

_TRIGONOMETRIC = rule(r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?", "«sin»", "«arctan»", "«cosh»", "ln")
_LOGARITHMS = ("ln", "log", "lg", "log_")
_I, _PI, _TEN = ("constant", "i"), ("constant", "pi"), ("number", Fraction(10), None)
_LARGEST = 10**6
"""Largest power that must be written out."""
_MAX_COMPARED = 24
TIDYING = frozenset(["division", "power", "common factor", "like factors", "expansion", "fraction in a fraction"])
"""Operations that may remain if the question is unknown or has no numbers."""


@lru_cache(maxsize=1 << 13)
def unfinished(tree: Node) -> frozenset[str]:
    """The operations that remain to be done, in words. An answer may leave those that the gold answer leaves."""
    found = set[str]()
    is_formula = bool(symbols(tree))
    value = tree[1] if tree[0] == "neg" else tree  # a fraction alone is a finished number
    for node in nodes(tree):
        kind = node[0]
        if kind == "big" or (kind == "call" and node[1] in ("det", "conj", "norm")):
            found.add(f"operator {node[1]}")
        if kind == "add":
            found |= {*_left_in_sum(node)}
        elif kind in ("mul", "div") and literal(node) is None:
            found |= {*_left_in_product(node)}
        elif kind == "div" and (_is_reducible_power(node) or (node is not value and _comes_out(node))):
            found.add("division")
        elif kind == "pow":
            found |= {*_left_in_power(node)}
            if node[1] == _TEN and literal(tree) is None and literal(node[2]) in (2, 3):
                found.add("power")  # scientific notation begins at larger powers
        if not symbols(node):
            found |= {*_left_in_constant(node, is_formula)}
    return frozenset(found)


def allowed(trees: Iterable[Node], is_concrete: bool) -> frozenset[str]:
    """The operations that an answer may leave, given the trees of the gold answer."""
    found = frozenset[str]().union(*map(unfinished, trees))
    if "power" in found:
        found |= {"arithmetic"}  # `5^2` and `5 \cdot 5`
    return found | {f"number: {what}" for what in found} | (frozenset() if is_concrete else TIDYING)


def unfinished_number(tree: Node) -> frozenset[str]:
    r"""The operations that remain in a number: some in `12^2` and `3^6/3`, none in `6/3` and `3 \cdot 10^4`."""
    return frozenset(f"number: {what}" for what in unfinished(tree) & TIDYING)


def _left_in_constant(node: Node, is_formula: bool) -> Iterator[str]:
    kind = node[0]
    if kind == "call" and _TRIGONOMETRIC.fullmatch(node[1]):
        yield "trigonometry"
    elif kind == "fact" or (kind == "call" and node[1] in ("binom", "!!")):
        if not is_formula:  # `x^5/5!` is as good as `x^5/120`
            yield "counting"
    elif kind == "call" and node[1] == "exp" and _I in nodes(node):
        yield "complex exponential"
    elif kind == "call" and node[1] not in (*_LOGARITHMS, "exp"):
        yield f"operator {node[1]}"
    elif kind in ("abs", "percent"):
        yield kind
    elif kind == "root" and _I in nodes(node[2]):
        yield "complex root"
    elif kind in ("root", "pow") and _is_nested(node):
        yield "nested roots"
    elif kind in ("root", "pow", "call") and literal(node) is None and _is_rational(node):
        yield "value"
    if kind == "div" and _I in nodes(node[2]):
        yield "quotient"


def _left_in_sum(node: Node) -> Iterator[str]:
    r"""Yields what can be added in a sum: `2 + 3`, `2x + 3x`, `3i - i`, `\ln 10 - \ln 2`, `(x+1)^2 - 2x`."""
    terms = [term for _, term in addends(node)]
    numbers = [term for term in terms if literal(term) is not None]
    if len(numbers) > 1:
        yield "arithmetic"
    if _have_like_terms([term for term in terms if literal(term) is None]):
        yield "like terms"
    elif symbols(node) and any(not a.isdisjoint(b) for a, b in combinations(map(monomials, terms), 2)):
        yield "expansion"
    arguments = [argument for term in terms for argument in _logarithm(term)]
    if any(a[0] == b[0] and math.gcd(a[1], b[1]) > 1 for a, b in combinations(arguments, 2)):
        yield "logarithms"


def _left_in_product(node: Node) -> Iterator[str]:
    r"""Yields what can be multiplied or cancelled in a product: `2 \cdot 3x`, `(4+2i)/2`, `x^2/x`."""
    above, below = factors(node)
    values = [[value for part in parts if (value := _factor_value(part))] for parts in (above, below)]
    is_split = any(value.denominator > 1 for value in values[0]) and values[1]
    if len(values[0]) > 1 or len(values[1]) > 1 or is_split:
        yield "arithmetic"
    size = math.prod((content(part) for part in below), start=Fraction(1))
    if size > 1 and size.denominator == 1 and content(node).denominator == 1:
        yield "division"
    if node[0] == "div" and any(part[0] == "div" and literal(part) is None for part in node[1:]):
        yield "fraction in a fraction"
    if not symbols(node):
        sums = [sum(part[0] == "add" for part in parts) for parts in (above, below)]
        if max(sums) > 1 or (_I in above and sums[0]):
            yield "product"
        radicands = [[number for part in parts if (number := _radicand(part)) > 0] for parts in (above, below)]
        pairs = [*combinations(radicands[0], 2), *combinations(radicands[1], 2), *product(*radicands)]
        if any(math.gcd(*pair) > 1 for pair in pairs):
            yield "roots"
    if below and have_common_factor(above, below):
        yield "common factor"
    bases = [part[1] if part[0] == "pow" and literal(part[2]) is not None else part for part in above]
    names = [base for base in bases if base[0] == "symbol" or base == _PI]
    if len({*names}) < len(names):
        yield "like factors"


def _left_in_power(node: Node) -> Iterator[str]:
    r"""Yields what can be expanded: `12^2`, `(2x)^3`, `(x^2)^3`; in constants also `(1 + \sqrt 2)^2` and `i^3`."""
    base, exponent, result = node[1], literal(node[2]), literal(node)
    is_whole = exponent is not None and exponent.denominator == 1
    if result is not None:
        if base != _TEN and max(abs(result.numerator), result.denominator) <= _LARGEST:
            yield "power"
    elif not symbols(node) and _I in nodes(node[2]):
        yield "complex exponential"
    elif not symbols(node) and (base == _I or (base[0] == "add" and (exact(node[2]) or Fraction()).denominator == 1)):
        yield "product"
    elif is_whole:
        is_power = base[0] == "pow" and (literal(base[2]) or Fraction(1, 2)).denominator == 1
        if is_power or (base[0] == "mul" and any(_factor_value(part) for part in factors(base)[0])):
            yield "power"


def _factor_value(tree: Node) -> Fraction | None:
    """The value of a factor that is a number, if it is neither 1 nor a power of ten."""
    value = literal(tree)
    is_ten = tree[0] == "pow" and tree[1] == _TEN
    return None if value is None or abs(value) == 1 or is_ten else value


def _is_reducible_power(tree: Node) -> bool:
    """Whether numerator and denominator, one of them a power, have a common factor: `3^6/3`."""
    if "pow" not in (tree[1][0], tree[2][0]):
        return False
    values = [literal(part) or Fraction() for part in tree[1:]]
    return math.gcd(*(value.numerator for value in values)) > 1


def _comes_out(tree: Node) -> bool:
    """Whether the tree is a division of numbers with a whole result."""
    return tree[0] == "div" and literal(tree[2]) != 1 and (literal(tree) or Fraction(1, 2)).denominator == 1


def _radicand(tree: Node) -> int:
    r"""The radicand of a square root, 50 of `\sqrt{50}`; 0 if the tree is none."""
    value = literal(tree[2]) if tree[0] == "root" and literal(tree[1]) == 2 else None
    return int(value) if value is not None and value.denominator == 1 else 0


def _logarithm(term: Node) -> Iterator[tuple[Node, int]]:
    """Yields the kind and the argument of each logarithm of a number that is a factor of the term."""
    for factor in factors(term)[0]:
        value = literal(factor[-1]) if factor[0] == "call" and factor[1] in _LOGARITHMS else None
        if value is not None:
            yield factor[:-1], value.numerator * value.denominator


def _is_nested(node: Node) -> bool:
    """Whether a root contains a root, or a power that is no rational number."""
    if node[0] == "pow" and (literal(node[2]) or Fraction(1)).denominator == 1:
        return False
    inner = node[2] if node[0] == "root" else node[1]
    return any(part[0] == "root" or (part[0] == "pow" and exact(part) is None) for part in nodes(inner))


def _have_like_terms(terms: Sequence[Node]) -> bool:
    """Whether two terms can be added: they differ by a number only, or their ratio is a small fraction."""
    rests = [rest for term in terms for _, rest in [normal(term)] if rest != ONE]
    if len({*rests}) < len(rests):
        return True
    by = precise(30)
    values: list[Any] = []
    for term in terms[:_MAX_COMPARED]:
        if not symbols(term) and exact(term) is None:
            try:
                values.append(by.value(term, {}))
            except NoNumber:
                continue
    return any(_is_small_fraction(left / right, by.context) for left, right in combinations(values, 2) if right)


def _is_rational(tree: Node) -> bool:
    """Whether the value of a root, a power or a logarithm is a small fraction."""
    by = precise(30)
    try:
        return _is_small_fraction(by.value(tree, {}), by.context)
    except NoNumber:
        return False


def _is_small_fraction(ratio: Any, context: Any) -> bool:
    real = context.re(ratio)
    if not 1e-9 < abs(real) < 1e9:  # as a fraction it could be very long
        return False
    near = Fraction(str(real)).limit_denominator(1000)
    return bool(near and abs(ratio - context.mpf(near.numerator) / near.denominator) < 1e-20)
