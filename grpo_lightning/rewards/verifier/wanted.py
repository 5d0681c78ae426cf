r"""The form that a question asks for: `Factor $x^2-1$` is not answered by `\frac{2x^2-2}{2}`, equal as it is."""

import math
import re
from collections.abc import Iterator
from fractions import Fraction

from grpo_lightning.rewards.verifier.asked import numbers_of
from grpo_lightning.rewards.verifier.forms import addends, content, factors, whole
from grpo_lightning.rewards.verifier.grammar import Node
from grpo_lightning.rewards.verifier.numbers import literal, nodes, symbols

_EXPAND = re.compile(r"\b(?:expand|multiply out)", re.IGNORECASE)
_PARTIAL = re.compile(r"\bpartial fraction", re.IGNORECASE)
_SQUARE = re.compile(r"\b(?:complet\w+ the square|vertex form)", re.IGNORECASE)
_FACTOR = re.compile(r"\bfactor", re.IGNORECASE)
_RADIANS = re.compile(r"\bradian", re.IGNORECASE)
_LOWEST = re.compile(r"\b(?:reduce|simplif|simplest|lowest)", re.IGNORECASE)
_POWER = re.compile(r"\bpower of\b", re.IGNORECASE)
_POLAR = re.compile(r"\b(?:rectangular|a \+ bi|a\+bi)", re.IGNORECASE)


def has_other_form(gold: Node, answer: Node, question: str) -> bool:
    """Whether the gold answer has the form that the question asks for, and an equal answer has it not."""
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
    """Whether it is a fraction of numbers that is not in lowest terms."""
    if tree[0] == "neg":
        return _is_reducible(tree[1])
    if tree[0] != "div" or literal(tree) is None:
        return False
    top, bottom = (literal(part) or Fraction(1) for part in tree[1:])
    return top.denominator > 1 or bottom.denominator > 1 or math.gcd(top.numerator, bottom.numerator) > 1


def _is_polar(tree: Node) -> bool:
    return any(node == ("constant", "e") for node in nodes(tree))


def _is_copied_number(gold: Node, answer: Node, question: str) -> bool:
    """Whether the question's number is to be written as a power, a product or in scientific notation, and is not."""
    right, said = _mantissa(gold), _mantissa(answer)
    if right is None:
        is_product = gold[0] in ("pow", "mul", "fact", "call") and not symbols(gold)
        return (
            is_product and literal(answer) is not None and answer[0] == "number" and answer[1] in numbers_of(question)
        )
    return said not in (None, right) and said in numbers_of(question)


def _mantissa(tree: Node) -> Fraction | None:
    r"""4.5 of `4.5 \times 10^3` and of `4.5`; None for what is neither."""
    if tree[0] == "neg":
        return _mantissa(tree[1])
    if tree[0] == "mul" and literal(tree) is not None:
        return literal(tree[1])
    return tree[1] if tree[0] == "number" else None


def _is_unexpanded(tree: Node) -> bool:
    """Whether a product with a sum, a power of one or a division by more than a number is to be multiplied out."""
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
    """Whether the square of a sum is in it."""
    return any(
        node[0] == "pow" and node[1][0] == "add" and symbols(node) and whole(node[2]) == 2 for node in nodes(tree)
    )


def _is_less_factored(gold: Node, answer: Node) -> bool:
    """Whether the answer has fewer factors than the gold answer, or numbers in them that could be pulled out."""
    right, said = list(_variable_factors(gold)), list(_variable_factors(answer))
    if right == [gold]:
        return False
    if len(said) < len(right) or _divides(answer) > _divides(gold):
        return True
    return all(content(part) == 1 for part in right) and any(content(part) != 1 for part in said)


def _divides(tree: Node) -> bool:
    """Whether something is divided by a variable."""
    return any(symbols(part) for node in nodes(tree) for part in factors(node)[1])


def _variable_factors(tree: Node) -> Iterator[Node]:
    """The factors that are no numbers, each as often as it counts."""
    for factor in factors(tree)[0]:
        power = whole(factor[2]) if factor[0] == "pow" else None
        base, times = (factor[1], power) if power and power > 0 else (factor, 1)
        if not symbols(base):
            continue
        inner = [base] if base[0] not in ("mul", "div", "neg", "pow") else list(_variable_factors(base))
        for _ in range(times):
            yield from inner
