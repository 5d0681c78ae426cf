r"""Tells whether an answer of equal value has not the form asked for: copied, rearranged, or another skeleton."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from grpo_lightning.plugins.verifier.forms import addends, factors, normal, order, whole
from grpo_lightning.plugins.verifier.grammar import Claim, Node
from grpo_lightning.plugins.verifier.numbers import is_percent, literal, nodes, symbols
from grpo_lightning.plugins.verifier.question import Asked, formulas_of, key, numbers_of, wants

_NAMES = ("symbol", "named", "apply")


def is_restated(gold: Claim, answer: Claim, question: str) -> bool:
    """Whether the answer is copied from the question, only rewrites it, or has not the form asked for."""
    asked = formulas_of(question)
    rest = tuple(item for item in answer.items[1:] if item.chain[1] != ("ne",))  # an exclusion may be copied
    answer = Claim((answer.items[0], *rest), answer.joins)
    solved = [_solved_for(claim.items[0].chain) for claim in (gold, answer) if len(claim.items[0].chain[1]) == 1]
    golds, answers = list(_parts(gold)), list(_parts(answer))
    return (
        (len(gold.items) == 1 and len(solved) == 2 and all(solved) and solved[0].isdisjoint(solved[1]))
        or _stands_there(golds, answers, asked)
        or any(_is_rearranged(golds, part, asked) for part in answers if part[0] == "chain" and part[1])
        or any(_has_other_form(*pair, question) for pair in _pairs(gold, answer))
    )


def _stands_there(golds: Sequence[Node], answers: Sequence[Node], asked: Asked) -> bool:
    """Whether the answer, or an unfinished part of it, is in the question, and the gold answer is not."""
    products = [factors(part)[0] for part in answers if part[0] == "mul" and not any(g[0] == "mul" for g in golds)]
    if any(len(parts) > 1 and all(p[0] == "add" and key(p) in asked.keys for p in parts) for parts in products):
        return True
    if any(map(is_percent, answers)) and any(literal(part) is not None and not is_percent(part) for part in golds):
        return False  # 30 and the 30 % of the question
    return bool({*map(key, answers)} & asked.keys - {*map(key, golds)})


# ----- the skeleton


def _has_other_form(gold: Node, answer: Node, question: str) -> bool:
    """Whether a question asks for a form, and the answer has another one than the gold answer."""
    is_shape = wants(question, "form")
    if literal(gold) is not None:
        is_sign = literal(gold) == literal(answer) and is_percent(gold) != is_percent(answer)
        return (is_shape or wants(question, "notation")) and (is_sign or _notation(gold) != _notation(answer))
    kinds, others = ({_operation(node) for node in nodes(tree)} for tree in (gold, answer))
    if numbers_of(question) and symbols(gold) and kinds == {""} != others:  # a polynomial wants a polynomial
        return True
    if "choice" in (gold[0], answer[0]) or answer[0] != gold[0] == "ratio":
        return False
    is_form = is_shape or (wants(question, "simplest") and not symbols(gold))
    return is_form and _skeleton(gold) != _skeleton(answer)


def _operation(tree: Node) -> str:
    """What makes a formula no polynomial: a function, a root, or a division by a formula with variables; else empty."""
    if not symbols(tree) or tree[0] in ("add", "mul", "neg", "symbol", "degree"):
        return ""
    is_whole = tree[0] == "pow" and (whole(tree[2]) or 0) > 0
    return "" if is_whole or (tree[0] == "div" and not symbols(tree[2])) else tree[0]


def _skeleton(tree: Node) -> Any:
    """What two spellings of one form share: all but order and signs; the factors, if it is a product of numbers."""
    if tree[0] in ("mul", "pow") and not symbols(tree) and all(literal(part) for part in factors(tree)[0]):
        parts = [(part[1], whole(part[2]) or 1) if part[0] == "pow" else (part, 1) for part in factors(tree)[0]]
        return sorted(literal(base) for base, times in parts for _ in range(times))
    if tree[0] == "chain":
        return sorted((_skeleton(side) for side in tree[2]), key=str)
    inverses = [node[0] for node in nodes(tree) if node[0] == "pow" and (literal(node[2]) or 0) < 0]
    return (inverses, *normal(tree, False))


def _notation(tree: Node) -> Any:
    """The way in which a number is written: whole, decimal, fraction, percentage, power, scientific."""
    if tree[0] in ("neg", "percent"):
        return _notation(tree[1])
    if tree[0] in ("pow", "mul"):
        return (tree[0], literal(tree[1]))
    return (tree[0], tree[0] == "number" and (tree[1].denominator > 1, tree[2] is not None and tree[1].denominator > 1))


# ----- equations


def _is_rearranged(golds: Sequence[Node], answer: Node, asked: Asked) -> bool:
    """Whether an equation has the terms of the question or multiples of them, and the gold equation has not.

    A solved gold equation wants one that is solved for the same variable; `2x > 8` is not.
    """
    solved, terms = _solved_for(answer), _terms(answer)
    relations = [part for part in golds if part[0] == "chain" and len(part[1]) == 1]
    if relations and (wanted := _solved_for(relations[0])) and terms:
        return solved.isdisjoint(wanted) and bool(asked.keys)
    same = [chain for chain in asked.relations if terms and _terms(chain) == terms]
    return bool(same) and (_terms(relations[0]) != terms if relations else not solved)


def _terms(chain: Node) -> tuple[tuple[Fraction, Node], ...]:
    """The terms of an equation, all on one side, up to a factor; () for a chain of several."""
    if len(chain[1]) != 1 or chain[1][0] not in ("=", "<", ">", "le", "ge", "ne"):
        return ()
    both = ("add", chain[2][0], ("neg", chain[2][1]))
    parts = [(sign * number, rest) for sign, term in addends(both) for number, rest in [normal(term)] if number]
    parts.sort(key=lambda part: (order(part[1]), abs(part[0])))
    return tuple((number / parts[0][0], rest) for number, rest in parts)


def _solved_for(chain: Node) -> frozenset[str]:
    """The variables for which an equation or inequality is solved."""
    left, right = chain[2][0], chain[2][-1]
    pairs = ((left, right), (right, left))
    return frozenset(one[1] for one, other in pairs if one[0] == "symbol" and one[1] not in symbols(other))


# ----- what a claim is made of


def _pairs(gold: Claim, answer: Claim) -> Iterator[tuple[Node, Node]]:
    """Yields the values of gold answer and answer as a pair, or the pairs of their parts if these have an order."""
    if len(gold.items) > 1 or len(answer.items) > 1:
        return
    chains = gold.items[0].chain, answer.items[0].chain
    if all(len(chain[1]) == 1 and chain[2][0][0] not in ("named", "apply") for chain in chains):
        yield chains
        return
    is_rounded = chains[1][1][-1:] == ("approx",) and chains[1][2][-2][0] not in _NAMES
    gold_value, answer_value = chains[0][2][-1], chains[1][2][-2 if is_rounded else -1]
    if {"chain", "set"}.isdisjoint(part[0] for claim in (gold, answer) for part in _parts(claim)):
        is_group = gold_value[0] == answer_value[0] == "group" and len(gold_value) == len(answer_value)
        yield from zip(gold_value[3:], answer_value[3:], strict=True) if is_group else [(gold_value, answer_value)]


def _parts(claim: Claim) -> Iterator[Node]:
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
