r"""Tells whether an answer of equal value lacks the form that the question wants: copied, rearranged, not expanded."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from grpo_lightning.plugins.rewards.verifier.forms import addends, factors, normal, order, small_integer
from grpo_lightning.plugins.rewards.verifier.grammar import Claim, Node
from grpo_lightning.plugins.rewards.verifier.numbers import is_percent, literal, nodes, symbols
from grpo_lightning.plugins.rewards.verifier.question import Formulas, formulas_of, key, numbers_of, wants

_NAMES = ("symbol", "named", "apply")


def is_restated(gold: Claim, answer: Claim, question: str) -> bool:
    """Tells whether the answer is copied from the question, only rewrites it, or lacks the form that it wants."""
    formulas = formulas_of(question)
    conditions = tuple(item for item in answer.items[1:] if item.operators != ("ne",))  # an exclusion may be copied
    answer = Claim((answer.items[0], *conditions), answer.joins)
    solved = [_solved_for(claim.items[0].chain) for claim in (gold, answer) if len(claim.items[0].operators) == 1]
    golds = [*_statements(gold)]
    answers = [*_statements(answer)]
    return (
        (len(gold.items) == 1 and len(solved) == 2 and all(solved) and solved[0].isdisjoint(solved[1]))
        or _stands_there(golds, answers, formulas)
        or any(_is_rearranged(golds, child, formulas) for child in answers if child[0] == "chain" and child[1])
        or any(_has_other_form(*pair, question) for pair in _pairs(gold, answer))
    )


def _stands_there(golds: Sequence[Node], answers: Sequence[Node], formulas: Formulas) -> bool:
    """Tells whether the answer, or a product of sums in it, is in the question, and the gold answer is not."""
    if not any(gold[0] == "mul" for gold in golds):
        products = [factors(tree)[0] for tree in answers if tree[0] == "mul"]
        if any(
            len(product) > 1 and all(factor[0] == "add" and key(factor) in formulas.keys for factor in product)
            for product in products
        ):
            return True
    if any(map(is_percent, answers)):
        return False  # 30 and the 30 % of the question
    return bool({*map(key, answers)} & formulas.keys - {*map(key, golds)})


# ----- the skeleton


def _has_other_form(gold: Node, answer: Node, question: str) -> bool:
    """Tells whether a question wants a form, and the answer has another form than the gold answer."""
    is_shape = wants(question, "form")
    if literal(gold) is not None:
        is_sign = literal(gold) == literal(answer) and is_percent(gold) != is_percent(answer)
        return (is_shape or wants(question, "notation")) and (is_sign or _notation(gold) != _notation(answer))
    kinds, answer_kinds = ({_operation(node) for node in nodes(tree)} for tree in (gold, answer))
    if numbers_of(question) and symbols(gold) and kinds == {""} != answer_kinds:  # a polynomial wants a polynomial
        return True
    if "choice" in (gold[0], answer[0]) or answer[0] != gold[0] == "ratio":
        return False
    is_form = is_shape or (wants(question, "simplest") and not symbols(gold))
    return is_form and _skeleton(gold) != _skeleton(answer)


def _operation(tree: Node) -> str:
    """Returns the kind of a node that no polynomial has: a function, a root, a division by variables; else empty."""
    if not symbols(tree) or tree[0] in ("add", "mul", "neg", "symbol", "degree"):
        return ""
    is_whole = tree[0] == "pow" and (small_integer(tree[2]) or 0) > 0
    return "" if is_whole or (tree[0] == "div" and not symbols(tree[2])) else tree[0]


def _skeleton(tree: Node) -> Any:
    """Returns a key that spellings of a form share, up to order and signs; of a product of numbers its factors."""
    numerator, _ = factors(tree)
    if tree[0] in ("mul", "pow") and not symbols(tree) and all(map(literal, numerator)):
        powers = [
            (factor[1], small_integer(factor[2]) or 1) if factor[0] == "pow" else (factor, 1) for factor in numerator
        ]
        return sorted(literal(base) for base, times in powers for _ in range(times))
    if tree[0] == "chain":
        return sorted((_skeleton(side) for side in tree[2]), key=str)
    inverses = [node[0] for node in nodes(tree) if node[0] == "pow" and (literal(node[2]) or 0) < 0]
    return (inverses, *normal(tree, False))


def _notation(tree: Node) -> Any:
    """Returns the way in which a number is written: whole, decimal, fraction, percentage, power, scientific."""
    if tree[0] in ("neg", "percent"):
        return _notation(tree[1])
    if tree[0] in ("pow", "mul"):
        return (tree[0], literal(tree[1]))
    return (tree[0], tree[0] == "number" and (tree[1].denominator > 1, tree[2] is not None and tree[1].denominator > 1))


# ----- equations


def _is_rearranged(golds: Sequence[Node], answer: Node, formulas: Formulas) -> bool:
    """Tells whether an equation has the terms of the question or multiples of them, and the gold equation has not.

    A solved gold equation wants one that is solved for the same variable; `2x > 8` is not.
    """
    solved = _solved_for(answer)
    terms = _terms(answer)
    relations = [child for child in golds if child[0] == "chain" and len(child[1]) == 1]
    if relations and (gold_solved := _solved_for(relations[0])) and terms:
        return solved.isdisjoint(gold_solved) and bool(formulas.keys)
    copied = [chain for chain in formulas.relations if terms and _terms(chain) == terms]
    return bool(copied) and (_terms(relations[0]) != terms if relations else not solved)


def _terms(chain: Node) -> tuple[tuple[Fraction, Node], ...]:
    """Returns the terms of an equation, all on one side, up to a factor."""
    difference = ("add", chain[2][0], ("neg", chain[2][1]))
    terms = [
        (sign * number, unscaled) for sign, term in addends(difference) for number, unscaled in [normal(term)] if number
    ]
    terms.sort(key=lambda term: (order(term[1]), abs(term[0])))
    return tuple((number / terms[0][0], unscaled) for number, unscaled in terms)


def _solved_for(chain: Node) -> frozenset[str]:
    """Returns the variables for which an equation or inequality is solved."""
    left, right = chain[2][0], chain[2][-1]
    pairs = ((left, right), (right, left))
    return frozenset(
        side[1] for side, other_side in pairs if side[0] == "symbol" and side[1] not in symbols(other_side)
    )


# ----- what a claim is made of


def _pairs(gold: Claim, answer: Claim) -> Iterator[tuple[Node, Node]]:
    """Yields the values or relations of gold answer and answer as a pair, if each of them is one."""
    if len(gold.items) > 1 or len(answer.items) > 1:
        return
    chains = gold.items[0].chain, answer.items[0].chain
    if all(len(chain[1]) == 1 and chain[2][0][0] not in ("named", "apply") for chain in chains):
        yield chains
        return
    is_rounded = chains[1][1][-1:] == ("approx",)
    gold_value, answer_value = chains[0][2][-1], chains[1][2][-2 if is_rounded else -1]
    if {"chain", "set"}.isdisjoint(child[0] for claim in (gold, answer) for child in _statements(claim)):
        yield gold_value, answer_value


def _statements(claim: Claim) -> Iterator[Node]:
    """Yields the values and the equations of a claim."""
    for item in claim.items:
        _, operators, operands = item.chain
        is_relation = set(operators) - {"=", "approx", "in"}
        is_equation = set(operators) == {"="} and operands[0][0] not in (*_NAMES, "words")
        if is_relation or is_equation:
            yield item.chain
        value = operands[-1]
        if value[0] in ("group", "set", "matrix"):
            yield from nodes(value)
        elif value[0] != "choice":
            yield value
