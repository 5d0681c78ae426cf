r"""Tells whether an answer of equal value only repeats the question: `\frac{48}{2}` where 48 are divided by 2."""

import math
from collections.abc import Iterator
from fractions import Fraction

from grpo_lightning.plugins.verifier import equality
from grpo_lightning.plugins.verifier.asked import Asked, canonical, formulas_of, multiple, number_form, numbers_of
from grpo_lightning.plugins.verifier.finished import unfinished
from grpo_lightning.plugins.verifier.forms import addends, factors, is_expanded, order, size, split
from grpo_lightning.plugins.verifier.grammar import Claim, Item, Node
from grpo_lightning.plugins.verifier.numbers import literal, nodes, symbols
from grpo_lightning.plugins.verifier.wanted import has_other_form, has_other_line

_LONG = 5
"""Nodes that a formula must exceed to be recognised inside another one."""
_GROWTH, _SLACK = 1.5, 2
"""Largest size of an answer equal to the formula asked for: this factor times the gold size, or this much more."""
_MAX_SIDES, _MAX_SIZE = 8, 80


def is_restated(gold: Claim, answer: Claim, question: str) -> bool:
    """Whether the answer is copied from the question, only rewrites it, or has not the form asked for."""
    asked = formulas_of(question)
    answer = _without_exclusions(answer)
    if len(gold.items) == len(answer.items) == 1 and has_other_line(gold.items[0], answer.items[0], question):
        return True
    gold_parts, answer_parts = list(_parts(gold)), list(_parts(answer))
    if _stands_there(gold, answer, gold_parts, answer_parts, asked):
        return True
    if any(_is_rearranged(gold_parts, part, asked) for part in answer_parts if part[0] == "chain" and part[1]):
        return True
    if numbers_of(question) and any(map(_is_undone, answer_parts)) and not any(map(_is_undone, gold_parts)):
        return True
    if Fraction(10) in numbers_of(question) and any(map(_is_power_of_ten, answer_parts)):
        return not any(map(_is_power_of_ten, gold_parts))
    return any(
        has_other_form(gold_value, answer_value, question)
        or _is_rewritten(gold_value, answer_value, asked)
        or _is_unreduced(answer_value, question) > _is_unreduced(gold_value, question)
        for gold_value, answer_value in _pairs(gold, answer)
    )


def _stands_there(gold: Claim, answer: Claim, gold_parts: list[Node], answer_parts: list[Node], asked: Asked) -> bool:
    """Whether the answer, or an unfinished part of it, is in the question, and the gold answer is not."""
    for there, form in ((asked.parts, canonical), (asked.multiples, multiple), (asked.forms, number_form)):
        if {*map(form, answer_parts)} & there - {*map(form, gold_parts)}:
            return True
    long = [side for side in asked.sides if sum(1 for _ in nodes(side)) > _LONG]
    for form in (canonical, multiple):
        whole = {*map(form, long)} - {None, ()}  # `what is asked + 0`
        if whole and whole & {*map(form, _all_nodes(answer))} - {*map(form, _all_nodes(gold))}:
            return True
    return any(_is_product_of(part, asked) for part in answer_parts) and not any(
        _is_product_of(part, asked) for part in gold_parts
    )


def _is_product_of(tree: Node, asked: Asked) -> bool:
    """Whether the tree is a product of two or more sums that are all in the question."""
    if tree[0] != "mul" or not symbols(tree):
        return False
    above, below = factors(tree)
    return len(above) > 1 and not below and all(part[0] == "add" and canonical(part) in asked.parts for part in above)


def _is_rewritten(gold: Node, answer: Node, asked: Asked) -> bool:
    """Whether the answer equals a formula of the question and is much longer than the gold answer."""
    long, short = size(answer), size(gold)
    if literal(gold) is not None or long <= max(_GROWTH * short, short + _SLACK) or long > _MAX_SIZE:
        return False
    if symbols(answer) and is_expanded(answer) and not unfinished(answer):
        return False
    sides = [side for side in asked.sides if short < size(side) <= min(2 * long, _MAX_SIZE)][:_MAX_SIDES]
    return any(symbols(side) == symbols(gold) and equality.equal(gold, side) for side in sides)


# ----- equations


def _is_rearranged(gold_parts: list[Node], answer: Node, asked: Asked) -> bool:
    """Whether an equation has the terms of the question or multiples of them, and the gold equation has not."""
    golds = [part for part in gold_parts if part[0] == "chain" and len(part[1]) == 1]
    if any(_is_solved(gold) and len(symbols(gold)) == 1 for gold in golds) and len(answer[1]) == 1:
        return bool(asked.parts) and not _is_solved(answer)  # `2x > 8`
    terms = _terms(answer)
    same = [chain for chain in asked.relations if terms and _terms(chain) == terms]
    if not same or not golds:
        return bool(same)
    gold = golds[0]
    if _terms(gold) != terms:
        return True
    if _is_solved(gold):
        return not _is_solved(answer)
    sides = {*map(_sides, same)}
    if _sides(answer) not in sides:
        return False
    return _sides(gold) not in sides or _has_fractions(answer) > _has_fractions(gold)


def _terms(chain: Node) -> tuple[tuple[Fraction, Node], ...]:
    """The terms of an equation, all on one side, up to a factor; () for a chain of several."""
    if len(chain[1]) != 1 or chain[1][0] not in ("=", "<", ">", "le", "ge", "ne"):
        return ()
    left, right = chain[2]
    parts = [(sign * number, rest) for sign, term in addends(left) for number, rest in [split(term)] if number]
    parts += [(-sign * number, rest) for sign, term in addends(right) for number, rest in [split(term)] if number]
    parts.sort(key=lambda part: (order(part[1]), abs(part[0])))
    return tuple((number / parts[0][0], rest) for number, rest in parts)


def _sides(chain: Node) -> frozenset[Node]:
    """Both sides, each up to a factor."""
    return frozenset(split(side)[1] for side in chain[2])


def _is_solved(chain: Node) -> bool:
    left, right = chain[2]
    return any(one[0] == "symbol" and one[1] not in symbols(other) for one, other in ((left, right), (right, left)))


def _has_fractions(chain: Node) -> bool:
    return any(node[0] == "div" or (node[0] == "number" and node[1].denominator > 1) for node in nodes(chain))


# ----- quotients


def _is_undone(tree: Node) -> bool:
    r"""Whether a division of numbers comes out, such as `48/2`, or has no whole numbers, such as `\frac{0.75}{0.6}`."""
    if tree[0] == "neg":
        return _is_undone(tree[1])
    if tree[0] != "div" or literal(tree) is None:
        return False
    top, bottom = (literal(part) or Fraction() for part in tree[1:])
    comes_out = abs(bottom) != 1 and (top / bottom).denominator == 1
    return comes_out or top.denominator > 1 or bottom.denominator > 1


def _is_unreduced(tree: Node, question: str) -> bool:
    r"""Whether a number of the question can be cancelled: `\frac{60\pi}{180}` for an angle of 60 degrees."""
    above, below = (math.prod(filter(None, map(literal, parts)), start=Fraction(1)) for parts in factors(tree))
    is_reduced = literal(tree) is not None or math.gcd(above.numerator, below.numerator) == 1
    return not is_reduced and not numbers_of(question).isdisjoint((abs(above), abs(below)))


def _is_power_of_ten(tree: Node) -> bool:
    """Whether the tree has the square or the cube of 10: scientific notation begins at larger powers."""
    powers = (node for node in nodes(tree) if node[0] == "pow" and node[1] == ("number", Fraction(10), None))
    return any(literal(power[2]) in (2, 3) for power in powers)


# ----- what a claim is made of


def _without_exclusions(claim: Claim) -> Claim:
    r"""The claim without conditions `x \ne 2` behind a formula, which may be copied from the question."""
    rest = tuple(item for item in claim.items[1:] if item.chain[1] != ("ne",))
    return Claim((*claim.items[:1], *rest), claim.joins)


def _all_nodes(claim: Claim) -> Iterator[Node]:
    return (node for item in claim.items for node in nodes(item.chain[2][-1]))


def _pairs(gold: Claim, answer: Claim) -> Iterator[tuple[Node, Node]]:
    """Yields the values of gold answer and answer as a pair, or the pairs of their parts if these have an order."""
    if len(gold.items) > 1 or len(answer.items) > 1:
        return
    gold_value, answer_value = (_with_degrees(claim.items[0]) for claim in (gold, answer))
    if {"chain", "set"}.isdisjoint(part[0] for claim in (gold, answer) for part in _parts(claim)):
        is_group = gold_value[0] == answer_value[0] == "group" and len(gold_value) == len(answer_value)
        yield from zip(gold_value[3:], answer_value[3:], strict=True) if is_group else [(gold_value, answer_value)]


def _with_degrees(item: Item) -> Node:
    value = item.chain[2][-1]
    return ("degree", value) if "degree" in dict(item.unit) and value[0] != "degree" else value


def _parts(claim: Claim) -> Iterator[Node]:
    """Yields the values and the equations of a claim."""
    for item in claim.items:
        _, operators, operands = item.chain
        if (operators and set(operators) - {"=", "approx", "in"}) or (
            operators and not set(operators) - {"="} and operands[0][0] not in ("symbol", "named", "apply", "words")
        ):
            yield item.chain
        for operand in operands[-1:]:
            if operand[0] in ("group", "set", "matrix"):
                yield operand
                yield from (part for part in nodes(operand) if part is not operand)
            elif operand[0] != "choice":
                yield operand
