r"""Checks the form that a question asks for: `\frac{2x^2-2}{2}` equals the answer to `Factor $x^2-1$` but is none."""

import math
import re
from collections.abc import Iterator
from fractions import Fraction

from grpo_lightning.plugins.verifier.asked import is_concrete, numbers_of
from grpo_lightning.plugins.verifier.forms import addends, content, factors, is_expanded, whole
from grpo_lightning.plugins.verifier.grammar import Item, Node
from grpo_lightning.plugins.verifier.numbers import literal, nodes, symbols
from grpo_lightning.plugins.verifier.rules import rule

_EXPAND = rule(r"\b(?:expand|multiply out)", "«Expand» the product", "Find x", flags=re.IGNORECASE)
_PARTIAL = rule(r"\bpartial fraction", "a «partial fraction» decomposition", "a fraction", flags=re.IGNORECASE)
_SQUARE = rule(
    r"\b(?:complet\w+ the square|vertex form|form[\s$]*[a-z]?\s*(?:\\left)?\([a-z]\s*[-+]\s*[a-z](?:\\right)?\)\^)",
    "«Complete the square»",
    "the «vertex form»",
    "in the «form $a(x - h)^»2 + k$",
    "the square",
    flags=re.IGNORECASE,
)
_FACTOR = rule(r"\bfactor", "«Factor» it", "Find x", flags=re.IGNORECASE)
_RADIANS = rule(r"\bradian", "in «radian»s", "in degrees", flags=re.IGNORECASE)
_LOWEST = rule(
    r"\b(?:reduce|simplif|simplest|lowest)", "«Simplif»y", "in «lowest» terms", "Find x", flags=re.IGNORECASE
)
_POWER = rule(r"\bpower of\b", "as a «power of» 2", "powers", flags=re.IGNORECASE)
_POLAR = rule(
    r"\b(?:rectangular|a \+ bi|a\+bi)", "in «rectangular» form", "as «a + bi»", "in polar form", flags=re.IGNORECASE
)
_FRACTION = rule(r"\bfraction\b", "as a common «fraction»", "fractional", flags=re.IGNORECASE)
_REPEATING = rule(r"\d\s*\\overline|\\overline\s*\{?\d", r"0.«3\overline»{6}", r"0.«\overline{3»6}", r"\overline{AB}")
_SCIENTIFIC = rule(r"\bscientific notation", "in «scientific notation»", "notation", flags=re.IGNORECASE)
_ROOTS = rule(
    r"\b(?:simplif|simplest|rationali[sz]|radical form)",
    "«Simplif»y and «rationaliz»e",
    "in «simplest» «radical form»",
    "irrational",
    flags=re.IGNORECASE,
)
_POSITIVE = rule(r"\bpositive exponents", "with «positive exponents»", "exponents", flags=re.IGNORECASE)
_LINE = rule(
    r"\bslope[- ]intercept form|\by\s*=\s*mx",
    "in «slope-intercept form»",
    "as $«y = mx» + b$",
    "the slope",
    flags=re.IGNORECASE,
)
_LOGARITHMS = ("ln", "log", "lg", "log_")
_MAX_BASE = 1000
_MAX_RADICAND = 10**15


def has_other_form(gold: Node, answer: Node, question: str) -> bool:
    """Whether the gold answer has the form that the question asks for, and an equal answer has not."""
    if _is_copied_number(gold, answer, question):
        return True
    if _RADIANS.search(question) and _is_less_radian(gold, answer):
        return True
    if _FRACTION.search(question) and _has_decimals(answer) > _has_decimals(gold) and _gives_decimal(gold, question):
        return True
    if _SCIENTIFIC.search(question) and literal(gold) in numbers_of(question) and _mantissa(gold) != _mantissa(answer):
        return True
    if _ROOTS.search(question) and _left_in_roots(answer) - _left_in_roots(gold):
        return True
    if _LOWEST.search(question) and _is_reducible(answer) and not _is_reducible(gold):
        return True
    if _POLAR.search(question) and not _is_polar(gold) and _is_polar(answer):
        return True
    if _POWER.search(question) and gold[0] == answer[0] == "pow" and None not in (literal(gold[1]), literal(answer[1])):
        return literal(gold[1]) != literal(answer[1])
    if not symbols(gold):
        return False
    if _is_polynomial(gold) and _divides(answer) and is_concrete(question):
        return True
    if _POSITIVE.search(question) and _has_negative_power(answer) > _has_negative_power(gold):
        return True
    if _PARTIAL.search(question) and _num_terms(answer) < _num_terms(gold):
        return True
    if _SQUARE.search(question) and _has_square(gold) > _has_square(answer):
        return True
    if _EXPAND.search(question):
        return not _is_unexpanded(gold) and _is_unexpanded(answer)
    return bool(_FACTOR.search(question)) and _is_less_factored(gold, answer)


def has_other_line(gold: Item, answer: Item, question: str) -> bool:
    """Whether the question wants `y = mx + b`, and the answer leaves that to be multiplied out: `y - 1 = 2(x - 3)`."""
    return bool(_LINE.search(question)) and _is_multiplied_out(gold) > _is_multiplied_out(answer)


def _is_multiplied_out(item: Item) -> bool:
    return all(map(is_expanded, item.chain[2][-2:]))


def _is_less_radian(gold: Node, answer: Node) -> bool:
    r"""Whether degrees are left in an angle, or the 180 that they are divided by: `300\pi/360`."""
    if any(node[0] == "degree" for node in nodes(gold)):
        return False
    divisors = [literal(node[2]) for node in nodes(answer) if node[0] == "div"]
    return any(node[0] == "degree" for node in nodes(answer)) or any(by and by % 180 == 0 for by in divisors)


def _gives_decimal(gold: Node, question: str) -> bool:
    """Whether a question gives the decimal that is to be written as a fraction."""
    return _REPEATING.search(question) is not None or literal(gold) in numbers_of(question)


def _has_decimals(tree: Node) -> bool:
    return any(node[0] == "percent" or (node[0] == "number" and _is_decimal(node)) for node in nodes(tree))


def _is_decimal(node: Node) -> bool:
    return node[2] is not None or node[1].denominator > 1


def _left_in_roots(tree: Node) -> frozenset[str]:
    """What is left to simplify in roots of numbers: a square in one, a fraction, one below the line."""
    found = set[str]()
    for node in nodes(tree):
        degree, value = _root_of(node)
        if degree and node[0] == "pow" and (literal(node[2]) or 0) < 0:
            found.add("below")
        if degree and value is not None:
            if value.denominator > 1:
                found.add("fraction")
            elif _has_power(abs(value.numerator), degree) or _is_power(abs(value.numerator), degree):
                found.add("power")
        elif node[0] == "div" and any(part[0] == "root" for below in factors(node)[1] for part in nodes(below)):
            found.add("below")
        elif (node[0] == "pow" or node[:2] == ("call", "exp")) and any(map(_is_logarithm, nodes(node))):
            found.add("logarithm")
    return frozenset(found)


def _is_logarithm(node: Node) -> bool:
    return node[0] == "call" and node[1] in _LOGARITHMS


def _root_of(node: Node) -> tuple[int, Fraction | None]:
    """The degree of a root of a number, also of `3^{1/2}`, and the number; 0 for anything else."""
    if node[0] == "root":
        return whole(node[1]) or 0, literal(node[2])
    exponent = literal(node[2]) if node[0] == "pow" else None
    return (exponent.denominator if exponent and exponent.denominator > 1 else 0), literal(
        node[1]
    ) if exponent else None


def _has_power(number: int, degree: int) -> bool:
    """Whether a power can be pulled out of the root: 4 of 12."""
    return degree > 1 and any(number % base**degree == 0 for base in range(2, _MAX_BASE) if base**degree <= number)


def _is_power(number: int, degree: int) -> bool:
    r"""Whether the degree of the root could be less: `\sqrt[4]{9}`."""
    if number > _MAX_RADICAND:
        return False
    roots = [(part, round(number ** (1 / part))) for part in range(2, degree + 1) if degree % part == 0]
    return number > 1 and any(root**part == number for part, root in roots)


def _is_polynomial(tree: Node) -> bool:
    """Whether the tree has sums, products and powers of variables only."""
    return all(
        node[0] in ("add", "mul", "neg", "number", "symbol")
        or (node[0] == "pow" and (whole(node[2]) or -1) > 0)
        or (node[0] == "div" and literal(node[2]) is not None)
        for node in nodes(tree)
    )


def _has_negative_power(tree: Node) -> bool:
    return any(node[0] == "pow" and (literal(node[2]) or 0) < 0 for node in nodes(tree))


def _is_reducible(tree: Node) -> bool:
    """Whether the tree is a fraction of numbers that is not in lowest terms."""
    if tree[0] == "neg":
        return _is_reducible(tree[1])
    if tree[0] != "div" or literal(tree) is None:
        return False
    top, bottom = (literal(part) or Fraction(1) for part in tree[1:])
    return top.denominator > 1 or bottom.denominator > 1 or math.gcd(top.numerator, bottom.numerator) > 1


def _is_polar(tree: Node) -> bool:
    return any(node == ("constant", "e") for node in nodes(tree))


def _is_copied_number(gold: Node, answer: Node, question: str) -> bool:
    """Whether the answer copies a number that the question wants as a power, a product or in scientific notation."""
    gold_mantissa, mantissa = _mantissa(gold), _mantissa(answer)
    if gold_mantissa is None:
        is_product = gold[0] in ("pow", "mul", "fact", "call") and not symbols(gold)
        return (
            is_product and literal(answer) is not None and answer[0] == "number" and answer[1] in numbers_of(question)
        )
    return mantissa not in (None, gold_mantissa) and mantissa in numbers_of(question)


def _mantissa(tree: Node) -> Fraction | None:
    r"""The mantissa: 4.5 of `4.5 \times 10^3` and of `4.5`; None for other trees."""
    if tree[0] == "neg":
        return _mantissa(tree[1])
    if tree[0] == "mul" and literal(tree) is not None:
        return literal(tree[1])
    return tree[1] if tree[0] == "number" else None


def _is_unexpanded(tree: Node) -> bool:
    """Whether something can be multiplied out: a product with a sum, a power of a sum, a division by a variable."""
    for node in nodes(tree):
        if node[0] == "mul" and any(part[0] == "add" and symbols(part) for part in factors(node)[0]):
            return True
        if node[0] == "neg" and node[1][0] == "add":
            return True
        if node[0] == "pow" and node[1][0] in ("add", "mul") and symbols(node[1]) and (whole(node[2]) or 0) != 0:
            return True
        if node[0] == "div" and symbols(node[2]):
            return True
    return False


def _num_terms(tree: Node) -> int:
    """How many terms a sum has, also if a number is pulled out of it."""
    parts = [part for part in factors(tree)[0] if symbols(part)]
    tree = parts[0] if len(parts) == 1 and tree[0] == "mul" else tree
    return sum(1 for _ in addends(tree))


def _has_square(tree: Node) -> bool:
    """Whether the tree contains the square of a sum."""
    return any(
        node[0] == "pow" and node[1][0] == "add" and symbols(node) and whole(node[2]) == 2 for node in nodes(tree)
    )


def _is_less_factored(gold: Node, answer: Node) -> bool:
    """Whether the answer has fewer factors than the gold answer, or common numbers left in them."""
    gold_factors, answer_factors = list(_variable_factors(gold)), list(_variable_factors(answer))
    if gold_factors == [gold]:
        return False
    if len(answer_factors) < len(gold_factors) or _divides(answer) > _divides(gold):
        return True
    return all(content(part) == 1 for part in gold_factors) and any(content(part) != 1 for part in answer_factors)


def _divides(tree: Node) -> bool:
    """Whether the tree has a division by a variable."""
    return any(symbols(part) for node in nodes(tree) for part in factors(node)[1])


def _variable_factors(tree: Node) -> Iterator[Node]:
    """Yields the factors that are no numbers, each with its multiplicity."""
    for factor in factors(tree)[0]:
        power = whole(factor[2]) if factor[0] == "pow" else None
        base, times = (factor[1], power) if power and power > 0 else (factor, 1)
        if not symbols(base):
            continue
        inner = [base] if base[0] not in ("mul", "div", "neg", "pow") else list(_variable_factors(base))
        for _ in range(times):
            yield from inner
