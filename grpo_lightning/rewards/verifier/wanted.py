r"""Checks the form that a question asks for: `\frac{2x^2-2}{2}` equals the answer to `Factor $x^2-1$` but is none."""

import math
import re
from collections.abc import Iterator
from fractions import Fraction

from grpo_lightning.rewards.verifier.asked import numbers_of
from grpo_lightning.rewards.verifier.forms import addends, content, factors, whole
from grpo_lightning.rewards.verifier.grammar import Node
from grpo_lightning.rewards.verifier.numbers import literal, nodes, symbols
from grpo_lightning.rewards.verifier.rules import rule

_EXPAND = rule(r"\b(?:expand|multiply out)", "«Expand» the product", "Find x", flags=re.IGNORECASE)
_PARTIAL = rule(r"\bpartial fraction", "a «partial fraction» decomposition", "a fraction", flags=re.IGNORECASE)
_SQUARE = rule(
    r"\b(?:complet\w+ the square|vertex form)",
    "«Complete the square»",
    "the «vertex form»",
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


def has_other_form(gold: Node, answer: Node, question: str) -> bool:
    """Whether the gold answer has the form that the question asks for, and an equal answer has not."""
    if _is_copied_number(gold, answer, question):
        return True
    if _RADIANS.search(question) and gold[0] != "degree" and answer[0] == "degree":
        return True
    if _LOWEST.search(question) and _is_reducible(answer) and not _is_reducible(gold):
        return True
    if _POLAR.search(question) and not _is_polar(gold) and _is_polar(answer):
        return True
    if _POWER.search(question) and gold[0] == answer[0] == "pow" and None not in (literal(gold[1]), literal(answer[1])):
        return literal(gold[1]) != literal(answer[1])
    if not symbols(gold):
        return False
    if _PARTIAL.search(question) and _num_terms(answer) < _num_terms(gold):
        return True
    if _SQUARE.search(question) and _has_square(gold) > _has_square(answer):
        return True
    if _EXPAND.search(question):
        return not _is_unexpanded(gold) and _is_unexpanded(answer)
    return bool(_FACTOR.search(question)) and _is_less_factored(gold, answer)


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
