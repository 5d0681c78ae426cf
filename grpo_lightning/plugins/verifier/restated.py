r"""Tells whether an answer of equal value has not the form asked for: copied, rearranged, or another skeleton."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from grpo_lightning.plugins.verifier import equality
from grpo_lightning.plugins.verifier.finished import unfinished
from grpo_lightning.plugins.verifier.forms import addends, factors, is_expanded, is_tree, normal, order, size, whole
from grpo_lightning.plugins.verifier.grammar import Claim, Item, Node
from grpo_lightning.plugins.verifier.numbers import is_percent, literal, nodes, symbols
from grpo_lightning.plugins.verifier.question import Asked, formulas_of, key, numbers_of
from grpo_lightning.plugins.verifier.rules import rule

_SHAPE = rule(
    r"(?i:\b(?:expand|multiply out|factor(?!ial)|partial fraction|complet\w+ the square|vertex form"
    r"|rectangular form|a ?\+ ?bi|radian|positive exponents|slope[- ]intercept|power of|(?:scientific )?notation"
    r"|form[\s$]*(?:[a-z] = )?[a-z]?\s*(?:\\left)?\([a-z]\s*[-+]\s*[a-z](?:\\right)?\)\^)|\by\s*=\s*mx)",
    "«Factor» it",
    "as a «power of» 2",
    "in the «form $a(x - h)^»2 + k$",
    "Find x",
)
"""Questions for a form: the answer has the skeleton of the gold answer."""
_NOTATION = rule(
    r"(?i:\b(?:as|to|in|into)\s+(?:an?\s+)?(?:\w+\s+){0,2}(?:decimal|fraction|percent|mixed number))",
    "Write it «as a common fraction»",
    "a fraction of it",
)
_SIMPLEST = rule(
    r"(?i:\b(?:reduce|simplif|simplest|lowest|rationali[sz]|radical form))",
    "«Simplif»y it",
    "in «lowest» terms",
    "Find x",
)
_POLYNOMIAL = frozenset(["add", "mul", "neg", "number", "symbol", "pow"])
_TEN: Node = ("number", Fraction(10), None)
_LONG = 5
"""Nodes that a formula must exceed to be recognised inside another one."""
_GROWTH, _SLACK = 1.5, 2
"""Largest size of an answer equal to the formula asked for: this factor times the gold size, or this much more."""
_MAX_SIDES, _MAX_SIZE = 8, 80


def is_restated(gold: Claim, answer: Claim, question: str) -> bool:
    """Whether the answer is copied from the question, only rewrites it, or has not the form asked for."""
    asked = formulas_of(question)
    rest = tuple(item for item in answer.items[1:] if item.chain[1] != ("ne",))  # an exclusion may be copied
    answer = Claim((*answer.items[:1], *rest), answer.joins)
    chains = gold.items[0].chain, answer.items[0].chain
    solved = [_solved_for(chain) for chain in chains if chain[1] == ("=",) and len(gold.items) == 1]
    if len(solved) == 2 and all(solved) and solved[0].isdisjoint(solved[1]):
        return True
    gold_parts, answer_parts = list(_parts(gold)), list(_parts(answer))
    if _stands_there(gold, answer, gold_parts, answer_parts, asked):
        return True
    if any(_is_rearranged(gold_parts, part, asked) for part in answer_parts if part[0] == "chain" and part[1]):
        return True
    if numbers_of(question) and any(map(_is_undone, answer_parts)) and not any(map(_is_undone, gold_parts)):
        return True
    return any(
        _has_other_form(gold_value, answer_value, question)
        or _is_rewritten(gold_value, answer_value, asked)
        or _is_unreduced(answer_value, question) > _is_unreduced(gold_value, question)
        for gold_value, answer_value in _pairs(gold, answer)
    )


def _stands_there(gold: Claim, answer: Claim, gold_parts: list[Node], answer_parts: list[Node], asked: Asked) -> bool:
    """Whether the answer, or an unfinished part of it, is in the question, and the gold answer is not."""
    products = [factors(part)[0] for part in answer_parts if part[0] == "mul"]
    if any(
        len(parts) > 1 and all(part[0] == "add" and key(part) in asked.keys for part in parts) for parts in products
    ):
        return not any(part[0] == "mul" for part in gold_parts)
    value, number = answer.items[0].chain[2][-1], literal(gold.items[0].chain[2][-1])
    if is_percent(value) and number not in (None, literal(value)):
        return False  # 30 and the 30 % of the question
    if {*map(key, answer_parts)} & asked.keys - {*map(key, gold_parts)}:
        return True
    long = {key(side) for side in asked.sides if sum(1 for _ in nodes(side)) > _LONG} - {()}  # `what is asked + 0`
    return bool(long and long & {*map(key, _all_nodes(answer))} - {*map(key, _all_nodes(gold))})


def _is_rewritten(gold: Node, answer: Node, asked: Asked) -> bool:
    """Whether the answer equals a formula of the question and is much longer than the gold answer."""
    long, short = size(answer), size(gold)
    if literal(gold) is not None or long <= max(_GROWTH * short, short + _SLACK) or long > _MAX_SIZE:
        return False
    if symbols(answer) and is_expanded(answer) and not unfinished(answer):
        return False
    sides = [side for side in asked.sides if short < size(side) <= min(2 * long, _MAX_SIZE)][:_MAX_SIDES]
    return any(symbols(side) == symbols(gold) and equality.equal(gold, side) for side in sides)


# ----- the skeleton


def _has_other_form(gold: Node, answer: Node, question: str) -> bool:
    """Whether a question asks for a form, and the answer has another one than the gold answer."""
    is_simplest, is_shape = _SIMPLEST.search(question), _SHAPE.search(question)
    if (is_simplest or is_shape) and any(map(_is_reducible, nodes(answer))) > any(map(_is_reducible, nodes(gold))):
        return True
    if literal(gold) is not None:
        is_sign = literal(gold) == literal(answer) and is_percent(gold) != is_percent(answer)
        return bool(is_shape or _NOTATION.search(question)) and (is_sign or _notation(gold) != _notation(answer))
    if {node[0] for node in nodes(gold)} <= _POLYNOMIAL and _divides(answer) and numbers_of(question):
        return True
    if "choice" in (gold[0], answer[0]) or answer[0] != gold[0] == "ratio":
        return False
    return bool(is_shape or (is_simplest and not symbols(gold))) and _skeleton(gold) != _skeleton(answer)


def _divides(tree: Node) -> bool:
    """Whether the tree has a division by a variable."""
    return any(symbols(part) for node in nodes(tree) for part in factors(node)[1])


def _skeleton(tree: Node) -> Any:
    """What two spellings of one form share: all but order and signs; the factors, if it is a product of numbers."""
    if tree[0] in ("mul", "pow") and not symbols(tree) and all(literal(part) for part in factors(tree)[0]):
        parts = [(part[1], whole(part[2]) or 1) if part[0] == "pow" else (part, 1) for part in factors(tree)[0]]
        return sorted(literal(base) for base, times in parts for _ in range(times))
    if tree[0] == "chain":
        return sorted((_skeleton(side) for side in tree[2]), key=str)
    odd = [node[0] for node in nodes(tree) if node[0] == "pow" and (literal(node[2]) or 0) < 0]
    odd += [
        "neg"
        for node in nodes(tree)
        for part in node[1:]
        if node[0] == "add" and part[0] == "neg" != part[1][0] == "add"
    ]
    return (odd, *normal(tree, False))


def _notation(tree: Node) -> Any:
    """The way in which a number is written: whole, decimal, fraction, percentage, power, scientific."""
    if tree[0] in ("neg", "percent"):
        return _notation(tree[1])
    if tree[0] == "pow":
        return ("power", literal(tree[1]))
    if tree[0] == "mul":
        return ("scientific", literal(tree[1]))
    return (tree[0], tree[0] == "number" and (tree[1].denominator > 1, tree[2] is not None and tree[1].denominator > 1))


def _is_reducible(tree: Node) -> bool:
    """Whether numbers above and below a line have a common factor; in `3/4` also whether they are no whole numbers."""
    tree = tree[1] if tree[0] == "neg" else tree
    if not is_tree(tree) or tree[0] in ("symbol", "number"):
        return False
    is_number = tree[0] == "div" and literal(tree) is not None
    both = ([tree[1]], [tree[2]]) if is_number else factors(tree)
    above, below = (math.prod(filter(None, map(literal, parts)), start=Fraction(1)) for parts in both)
    return math.gcd(above.numerator, below.numerator) > 1 or (is_number and above.denominator * below.denominator > 1)


# ----- equations


def _is_rearranged(gold_parts: list[Node], answer: Node, asked: Asked) -> bool:
    """Whether an equation has the terms of the question or multiples of them, and the gold equation has not."""
    golds = [part for part in gold_parts if part[0] == "chain" and len(part[1]) == 1]
    solved = _solved_for(answer)
    if any(_solved_for(gold) and (len(symbols(gold)) == 1 or solved) for gold in golds) and len(answer[1]) == 1:
        return bool(asked.keys) and not solved & _solved_for(golds[0])  # `2x > 8`; another variable
    terms = _terms(answer)
    same = [chain for chain in asked.relations if terms and _terms(chain) == terms]
    if not same or not golds:
        return bool(same) and not solved
    gold = golds[0]
    if _terms(gold) != terms:
        return True
    if _solved_for(gold):
        return not solved
    sides = {*map(_sides, same)}
    if _sides(answer) not in sides:
        return False
    return _sides(gold) not in sides or _has_fractions(answer) > _has_fractions(gold)


def _terms(chain: Node) -> tuple[tuple[Fraction, Node], ...]:
    """The terms of an equation, all on one side, up to a factor; () for a chain of several."""
    if len(chain[1]) != 1 or chain[1][0] not in ("=", "<", ">", "le", "ge", "ne"):
        return ()
    both = ("add", chain[2][0], ("neg", chain[2][1]))
    parts = [(sign * number, rest) for sign, term in addends(both) for number, rest in [normal(term)] if number]
    parts.sort(key=lambda part: (order(part[1]), abs(part[0])))
    return tuple((number / parts[0][0], rest) for number, rest in parts)


def _sides(chain: Node) -> frozenset[Node]:
    """Both sides, each up to a factor."""
    return frozenset(normal(side)[1] for side in chain[2])


def _solved_for(chain: Node) -> frozenset[str]:
    """The variables for which an equation or inequality is solved."""
    left, right = chain[2][0], chain[2][-1]
    pairs = ((left, right), (right, left))
    return frozenset(one[1] for one, other in pairs if one[0] == "symbol" and one[1] not in symbols(other))


def _has_fractions(chain: Node) -> bool:
    return any(node[0] == "div" or (node[0] == "number" and node[1].denominator > 1) for node in nodes(chain))


# ----- quotients


def _is_undone(tree: Node) -> bool:
    r"""Whether a division of numbers comes out, such as `48/2`, or has no whole numbers, such as `\frac{0.75}{0.6}`."""
    if tree[0] == "neg":
        return _is_undone(tree[1])
    if tree[0] == "pow" and tree[1] == _TEN:
        return literal(tree[2]) in (2, 3)  # scientific notation begins at larger powers
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


# ----- what a claim is made of


def _all_nodes(claim: Claim) -> Iterator[Node]:
    return (node for item in claim.items for node in nodes(item.chain[2][-1]))


def _pairs(gold: Claim, answer: Claim) -> Iterator[tuple[Node, Node]]:
    """Yields the values of gold answer and answer as a pair, or the pairs of their parts if these have an order."""
    if len(gold.items) > 1 or len(answer.items) > 1:
        return
    chains = gold.items[0].chain, answer.items[0].chain
    if all(len(chain[1]) == 1 and chain[2][0][0] not in ("named", "apply") for chain in chains):
        yield chains
        return
    gold_value, answer_value = (_with_degrees(claim.items[0]) for claim in (gold, answer))
    if {"chain", "set"}.isdisjoint(part[0] for claim in (gold, answer) for part in _parts(claim)):
        is_group = gold_value[0] == answer_value[0] == "group" and len(gold_value) == len(answer_value)
        yield from zip(gold_value[3:], answer_value[3:], strict=True) if is_group else [(gold_value, answer_value)]


def _with_degrees(item: Item) -> Node:
    _, operators, operands = item.chain
    is_rounded = operators[-1:] == ("approx",) and operands[-2][0] not in ("symbol", "named", "apply")
    value = operands[-2 if is_rounded else -1]
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
