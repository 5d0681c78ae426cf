r"""Tells whether an answer is in finished form: `8\sqrt2` is, `\sqrt{50}+\sqrt{18}` and `2x+3x` are not."""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

from grpo_lightning.plugins.rewards.verifier import question
from grpo_lightning.plugins.rewards.verifier.forms import addends, factors, normal, small_integer
from grpo_lightning.plugins.rewards.verifier.grammar import Node, number_node, per_tree
from grpo_lightning.plugins.rewards.verifier.numbers import NoNumber, exact, literal, nodes, precise, symbols
from grpo_lightning.plugins.rewards.verifier.words import word_set

_I = ("constant", "i")
_PI = ("constant", "pi")
_TEN = number_node(10)
_LARGEST = 10**6
"""The largest power that must be written out."""
_STAYING = word_set("ln log lg log_ root pow")
"""Functions of numbers that stay, unless their value is a fraction."""
_TIDYING = frozenset(["division", "power", "like factors", "expansion"])


@per_tree
def unfinished(tree: Node) -> frozenset[str]:
    """Returns the operations that remain to be done, in words. An answer may leave the gold answer's operations."""
    operations = set[str]()
    is_number = literal(tree) is not None
    for node in nodes(tree):
        kind = node[0]
        if kind == "add":
            operations.update(_left_in_sum(node))
        elif kind in ("mul", "div"):
            operations.update(_left_in_product(node) if literal(node) is None else _left_in_quotient(node))
        elif kind == "pow":
            operations.update(_left_in_power(node))
        if not symbols(node) and not is_number:
            operations.update(_left_in_constant(node, bool(symbols(tree))))
    if tree[0] == "pow" and tree[1] == _TEN and literal(tree[2]) in (2, 3):  # scientific notation begins at 10^4
        operations.add("last step")
    if is_number and "power" in operations:
        operations ^= {"power", "power in a number"}
    return frozenset(operations)


def allowed(golds: Iterable[Node], problem: str) -> frozenset[str]:
    """Returns the operations that an answer may leave: the gold answer's, and some that the question does not want.

    Without a question anything may be left that only tidies a formula. Without numbers in it the last step may be left.
    Fractions must be in lowest terms only if the question wants it.
    """
    operations = set[str]().union(*map(unfinished, golds))
    if not question.words_of(problem):
        operations |= _TIDYING
    if not question.numbers_of(problem):
        operations.add("last step")
    if not question.wants(problem, "simplest", "form"):
        operations.add("reduction")
    return frozenset(operations)


def num_terms(tree: Node) -> int:
    r"""Returns the number of terms of a constant, brackets opened: 1 of `8\sqrt2`, 2 of `\sqrt{50}+\sqrt{18}`."""
    kind, *children = tree
    if kind == "add":
        return sum(num_terms(child) for child in children if literal(child) != 0)
    if kind == "mul":
        return math.prod(map(num_terms, children))
    if kind == "pow":
        return (
            2 if _I in nodes(children[1]) else num_terms(children[0]) ** min(4, max(1, small_integer(children[1]) or 1))
        )
    return num_terms(children[-1] if kind == "pm" else children[0]) if kind in ("neg", "div", "pm") else 1


def _left_in_constant(node: Node, is_formula: bool) -> Iterator[str]:
    """Yields operations left in a number: a function, a root or a power with a rational value, `1/i`."""
    name = node[1] if node[0] == "call" else node[0]
    if name in _STAYING:
        if _I in nodes(node[2]):
            yield f"complex {name}"
        if literal(node) is None and _is_rational(node):
            yield "value"
    elif node[0] in ("call", "fact", "abs", "percent") and not (is_formula and name in ("fact", "binom")):
        yield f"function {name}"  # but `x^5/5!` is as good as `x^5/120`


def _left_in_sum(node: Node) -> Iterator[str]:
    r"""Yields operations left in a sum: `2 + 3`, `2x + 3x`, `3i - i`."""
    terms = [term for _, term in addends(node)]
    unscaled_terms = [normal(term)[1] for term in terms if literal(term) is None]
    if len(unscaled_terms) < len(terms) - 1:
        yield "arithmetic"
    if len({*unscaled_terms}) < len(unscaled_terms):
        yield "like terms"
    for index, term in enumerate(terms):
        other_symbols = set[str]().union(*map(symbols, terms[:index] + terms[index + 1 :]))
        if symbols(term) & other_symbols and any(factor[0] == "add" for factor in factors(term)[0]):
            yield "expansion"


def _left_in_product(node: Node) -> Iterator[str]:
    r"""Yields operations left in a product, multiplications and cancellations: `2 \cdot 3x`, `(4+2i)/2`, `x^2/x`."""
    # The numbers among the factors above and below the fraction bar.
    above, below = factors(node)
    values = [[value for value in map(literal, side) if value and abs(value) != 1] for side in (above, below)]
    is_split = any(value.denominator > 1 for value in values[0]) and values[1]
    if len(values[0]) > 1 or len(values[1]) > 1 or is_split:
        yield "arithmetic"

    # Their quotient, alone and distributed over the terms of a sum.
    top, bottom = (math.prod(factor, start=Fraction(1)) for factor in values)
    if math.gcd(top.numerator, bottom.numerator) > 1:
        yield "reduction"
    terms = [term for factor in above if factor[0] in ("add", "degree") for _, term in addends(factor)]
    numbers = [top * _number_in(term) for term in terms] or [top]
    if abs(bottom) > 1 and all((number / bottom).denominator == 1 for number in numbers):
        yield "division"

    # Powers of one variable.
    bases = [
        factor[1] if factor[0] == "pow" and literal(factor[2]) is not None else factor for factor in (*above, *below)
    ]
    names = [base for base in bases if base[0] == "symbol" or base == _PI]
    if len({*names}) < len(names):
        yield "like factors"


def _left_in_quotient(node: Node) -> Iterator[str]:
    r"""Yields operations left in a quotient of numbers: `48/2` comes out, `4/6` and `0.75/0.6` can be reduced."""
    if node[0] == "div":
        top, bottom = (literal(child) or Fraction(1) for child in node[1:])
        is_decimal = top.denominator > 1 or bottom.denominator > 1
        if is_decimal or (abs(bottom) != 1 and (top / bottom).denominator == 1):
            yield "last step"
        if is_decimal or math.gcd(top.numerator, bottom.numerator) > 1:
            yield "reduction"


def _left_in_power(node: Node) -> Iterator[str]:
    r"""Yields operations left in a power: `12^2`, `(2x)^3`, `(x^2)^3`; in constants also `i^3`."""
    base = node[1]
    exponent = exact(node[2])
    result = literal(node)
    is_whole = exponent is not None and exponent.denominator == 1
    is_number = result is not None and base != _TEN and max(abs(result.numerator), result.denominator) <= _LARGEST
    if is_number or (result is None and is_whole and base[0] in ("pow", "mul")):
        yield "power"
    if is_whole and base == _I:
        yield "product"


def _number_in(term: Node) -> Fraction:
    r"""Returns the product of the factors of a term that are numbers: 6 of `\pm 2 \cdot 3x`."""
    bare = term[-1] if term[0] in ("pm", "degree") else term
    return math.prod(filter(None, map(literal, factors(bare)[0])), start=Fraction(1))


def _is_rational(tree: Node) -> bool:
    """Tells whether the value of a root, a power or a logarithm is a small fraction."""
    if exact(tree) is not None:
        return True
    evaluator = precise(30)
    try:
        value = evaluator.value(tree, {})
    except NoNumber:
        return False
    real = evaluator.context.re(value)
    if not 1e-9 < abs(real) < 1e9:  # as a fraction it could be very long
        return False
    nearest = Fraction(str(real)).limit_denominator(1000)
    return bool(nearest and abs(value - evaluator.context.mpf(nearest.numerator) / nearest.denominator) < 1e-20)
