"""Rewrites other spellings of a claim: side conditions, values that follow, named points, unit vectors."""

import re
from fractions import Fraction

from grpo_lightning.plugins.verifier.grammar import Claim, Item, Node
from grpo_lightning.plugins.verifier.numbers import literal, nodes, symbols
from grpo_lightning.plugins.verifier.rules import rule
from grpo_lightning.plugins.verifier.settling import by_names, values_agree
from grpo_lightning.plugins.verifier.units import conversion

_UNIT_VECTOR = rule(r"(?:(?:bold|vec|hat|overline) )+([ijk])", "«bold i»", "«hat vec k»", "i")
_POINT = rule(r"[A-Z](?:_\w+|'+)?", "«V»", "«V'»", "«P_1»", "v")
_ZERO: Node = ("number", Fraction(), None)


def without_conditions(gold: Claim, answer: Claim) -> Claim:
    r"""The answer without the `x \ne 1` after a formula in x, if the gold answer has no condition."""
    if len(gold.items) != 1 or len(answer.items) < 2 or answer.joins - {",", ";", "where", "and"}:
        return answer
    named = symbols(gold.items[0].chain[2][-1])
    if not _is_exclusion(answer.items[1], named):
        return answer
    rest = [item for item in answer.items[2:] if not _is_exclusion(item, named) and not _is_bare_number(item)]
    return answer if rest else Claim(answer.items[:1])


def excluded(claim: Claim) -> bool:
    r"""Whether all items after the first exclude values of its variables: `x+1, x \ne 1`."""
    named = symbols(claim.items[0].chain[2][-1])
    return (
        len(claim.items) > 1
        and not claim.items[0].chain[1]
        and all(_is_exclusion(item, named) for item in claim.items[1:])
    )


def _is_bare_number(item: Item) -> bool:
    r"""Whether an item is only a number: the 3 of `x \ne 1, 3`."""
    return not item.chain[1] and not item.unit and literal(item.chain[2][0]) is not None


def _is_exclusion(item: Item, named: frozenset[str] | set[str]) -> bool:
    r"""Whether an item only excludes values: `x \ne 1`, `x \ne 0, 1`."""
    _, operators, operands = item.chain
    return (
        operators == ("ne",)
        and operands[0][0] == "symbol"
        and operands[0][1] in named
        and not symbols(operands[1]) & named
    )


def concluded(answer: Claim) -> Claim:
    """The claim of the last item if it follows from all others: 7 of `a=4, b=3, a+b=7`."""
    if len(answer.items) < 3 or answer.joins - {",", ";", "and"}:
        return answer
    *given, last = answer.items
    values = by_names(Claim(tuple(given), answer.joins))
    _, operators, operands = last.chain
    used = symbols(operands[0])
    if set(operators) != {"="} or operands[0][0] in ("symbol", "named", "apply") or used != set(values):
        return answer
    links = [_inserted(part, values) for part in operands]
    if any(symbols(link) for link in links) or not all(values_agree(link, links[-1]) for link in links[:-1]):
        return answer
    return Claim((Item(("chain", (), operands[-1:]), last.unit, last.names_things),))


def _inserted(tree: Node, values: dict[str, Node]) -> Node:
    if tree[:1] == ("symbol",):
        return values.get(tree[1], tree)
    return tuple(_inserted(part, values) if isinstance(part, tuple) else part for part in tree)


def are_amounts(item: Item) -> bool:
    """Whether the amounts of an item in several units are equal: `1.5 hours = 90 minutes`."""
    value = literal(item.chain[2][-1])
    for other, unit in item.amounts:
        size, factor = literal(other), conversion(item.unit, unit)
        if value is None or size is None or factor is None or size != value * factor:
            return False
    return True


def is_nothing(claim: Claim) -> bool:
    r"""Whether the claim is that there is no solution: `\emptyset`, `no solutions`."""
    if len(claim.items) != 1 or claim.items[0].chain[1]:
        return False
    (value,) = claim.items[0].chain[2]
    text = " ".join(map(str, value[1:])).casefold().rstrip(".") if value[0] == "words" else ""
    return value == ("set",) or bool(_NOTHING.fullmatch(text))


_NOTHING = rule(
    r"none|(?:there (?:is|are) )?no (?:such )?(?:real |valid |possible )?(?:solutions?|values?|roots?|numbers?)"
    r"(?: exists?)?|(?:the )?(?:empty|null) set",
    "«none»",
    "«there are no real solutions»",
    "two solutions",
)


def without_point(value: Node) -> Node:
    """The value without the name of a point: (2,-1) of `V(2,-1)`."""
    if value[0] == "mul" and len(value) == 3 and value[1][0] == "symbol" and _POINT.fullmatch(value[1][1]):
        return value[2] if value[2][:3] == ("group", "(", ")") and len(value[2]) > 4 else value
    if value[0] == "apply" and _POINT.fullmatch(value[1]) and len(value) > 3:
        return ("group", "(", ")", *value[2:])
    return value


def components(value: Node) -> Node:
    r"""The components of a sum of unit vectors: (2,-1) of `2\mathbf i-\mathbf j`; three if there is a k."""
    terms = value[1:] if value[0] == "add" else (value,)
    found: dict[str, Node] = {}
    for term in terms:
        vector = next((match[1] for node in nodes(term) if (match := _unit_vector(node))), "")
        factor = _factor(term)
        if not vector or factor is None or vector in found:
            return value
        found[vector] = factor
    names = "ijk" if "k" in found else "ij"
    return ("group", "(", ")", *(found.get(name, _ZERO) for name in names))


def _unit_vector(node: Node) -> re.Match[str] | None:
    return _UNIT_VECTOR.fullmatch(node[1]) if node[0] == "symbol" else None


def _factor(term: Node) -> Node | None:
    """The factor of a unit vector; None if the term has no such form."""
    if term[0] == "neg":
        inner = _factor(term[1])
        value = literal(inner) if inner is not None else None
        return ("number", -value, None) if value is not None else inner and ("neg", inner)
    if _unit_vector(term):
        return ("number", Fraction(1), None)
    if term[0] == "mul" and _unit_vector(term[2]):
        return term[1]
    if term[0] == "div" and (inner := _factor(term[1])) is not None:
        return ("div", inner, term[2])
    return None


def is_of_time(gold: Node, answer: Node) -> bool:
    """Whether a time on a 24-hour clock, after noon, is the gold time: `16:30` for `4:30 p.m.`."""
    parts = [literal(part) for part in answer[1:]]
    hours = parts[0]
    if gold[0] != "time" or gold[1] != "pm" or hours is None or not 13 <= hours <= 23 or len(parts) not in (2, 3):
        return False
    wanted = (*gold[2:], Fraction(), Fraction())[:3]
    return [hours - 12, *parts[1:], Fraction()][:3] == list(wanted)
