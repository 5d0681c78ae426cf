"""The normal form of claims: a value with its names, its domain and what it excludes; a list; named values."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo_lightning.plugins.verifier import equality
from grpo_lightning.plugins.verifier.grammar import Claim, Item, Node
from grpo_lightning.plugins.verifier.numbers import NoNumber, exact, is_decimal, literal, nodes, precise, symbols
from grpo_lightning.plugins.verifier.question import key
from grpo_lightning.plugins.verifier.rules import rule
from grpo_lightning.plugins.verifier.units import conversion
from grpo_lightning.plugins.verifier.words import word_set

WHOLES = word_set("group set matrix cases builder ratio time base numbers union minus meet dots chain mod words")
COUNTERS = frozenset("knm")
_UNIT_VECTOR = rule(r"(?:(?:bold|vec|hat|overline) )+([ijk])", "«bold i»", "«hat vec k»", "i")
_POINT = rule(r"[A-Z](?:_\w+|'+)?", "«V»", "«P_1»", "v")
_NOTHING = rule(
    r"none|(?:there (?:is|are) )?no (?:such )?(?:real |valid |possible )?(?:solutions?|values?|roots?|numbers?)"
    r"(?: exists?)?|(?:the )?(?:empty|null) set",
    "«none»",
    "«there are no real solutions»",
    "two solutions",
)
_ONE, _ZERO = (("number", Fraction(value), None) for value in (1, 0))


@dataclass(frozen=True, slots=True)
class Settled:
    r"""The value that an item settles on: 3 of `x = 1 + 2 = 3 \approx 3.0`."""

    value: Node
    names: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()
    """The names of `(x, y) = (2, 3)`."""
    links: tuple[Node, ...] = ()
    """The other operands, which the item claims to equal the value."""
    close: Node | None = None
    """The rounded value after an approximation sign."""


@dataclass(frozen=True, slots=True)
class Scoped:
    """A claim without its side conditions, and these."""

    claim: Claim
    domain: tuple[str, Node] | None = None
    r"""The counter and its set: `n \in \mathbb Z`."""
    excluded: tuple[Node, ...] = ()
    r"""Relations `x \ne 1` for variables of the value."""


# ----- an item and its value


def settle(item: Item, asked: frozenset[Node] | None = None) -> Settled | None:
    r"""The value that an item settles on; None for a relation that is not solved.

    Args:
        item: The item.
        asked: The formulas of the question. They, and `m + n`, may be names; None if only names may.
    """
    _, operators, operands = item.chain
    if operators == ("in",) and operands[1][0] in WHOLES and (name := _names(operands[0], None)):
        return Settled(operands[1], frozenset(name), name if operands[0][0] == "group" else ())
    if set(operators) - {"=", "approx"} or "approx" in operators[:-1]:
        return None
    close = None
    if operators[-1:] == ("approx",) and not (len(operands) == 2 and _names(operands[0], asked)):
        close, operands = operands[-1], operands[:-1]
    *before, value = operands
    names: set[str] = set()
    order: tuple[str, ...] = ()
    links = []
    for index, link in enumerate(before):
        if name := _names(link, asked):
            names |= set(name)
            order = name if link[0] == "group" else order
        elif link[0] == "pow" and value[0] == "matrix" and link[1][0] == "symbol":
            names.add(repr(link))
        elif (
            not symbols(link)
            or index
            or any(node[0] == "big" for node in nodes(link))
            or _is_identity(link, value, asked)
        ):
            links.append(link)
        else:
            return None
    return None if value[0] == "words" and before else Settled(value, frozenset(names), order, tuple(links), close)


def _is_identity(link: Node, value: Node, asked: frozenset[Node] | None) -> bool:
    """Whether `x + (x + 4) = 2x + 4` is the calculation of a formula."""
    if any(node[0] == "big" for node in nodes(link)):
        return True
    return asked is not None and bool(symbols(value)) and link[0] not in WHOLES and equality.equal(link, value)


def _names(tree: Node, asked: frozenset[Node] | None) -> tuple[str, ...]:
    r"""The names on the left side of an equation: `x`, `f(3)`, `|AB|`, `(x, y)`, what is asked for; else empty."""
    kind = tree[0]
    if kind in ("symbol", "named"):
        return (tree[1],)
    if kind == "words":
        return (" ".join(map(str, tree[1:])),)
    if kind == "apply":
        return (repr(tree),)
    if kind == "group" and tree[1:3] in (("(", ")"), ("[", "]")):
        parts = [_names(part, asked) for part in tree[3:]]
        return tuple(part[0] for part in parts) if all(len(part) == 1 for part in parts) else ()
    names = symbols(tree)
    is_upper = bool(names) and all(name[0].isupper() or name.startswith("angle") or name == "m" for name in names)
    is_sum = kind == "add" and all(part[0] == "symbol" for part in tree[1:])
    is_function = kind in ("call", "abs") and tree[1] not in ("exp", "ln") and names
    if kind == "ratio" and all(part[0] == "symbol" for part in tree[1:]):
        return (repr(tree),)
    if kind in ("call", "abs", "mul") and is_upper and (asked is not None or kind != "mul"):
        return (repr(tree),)
    if asked is not None and (key(tree) in asked - {()} or (not asked and (is_sum or is_function))):
        return (repr(tree),)
    return ()


def is_true(settled: Settled) -> bool:
    """Whether the value equals all its links, as far as numbers can tell."""
    value = settled.value
    for link in settled.links:
        inner = {node[0] for node in nodes(link)}
        is_open = inner & {"big"} or any(node[:2] in _OPEN for node in nodes(link))
        if is_open or link == value:
            continue
        if (link[0] in WHOLES or value[0] in WHOLES) and link[0] != value[0] and exact(link) is None:
            return False
        if inner & WHOLES - {"base"}:
            continue
        if symbols(link):
            if link[0] == "mul" and literal(link[1]) is not None and link[2][0] == "symbol" and not symbols(value):
                return False
            continue
        if not agree(link, value) and not _is_close(link, value, True):
            return False
    return settled.close is None or _is_close(value, settled.close, False)


_OPEN = (("call", "det"), ("call", "norm"), ("call", "conj"))


def agree(left: Node, right: Node) -> bool:
    """Whether two trees are identical, or have the same number as value."""
    return left == right or (not symbols(left) and not symbols(right) and equality.equal_constants(left, right))


def _is_close(value: Node, decimal: Node, rounded: bool) -> bool:
    """Whether a decimal is close to a value: within half a unit of its last digit, or 1 %."""
    if symbols(value) or symbols(decimal):
        return value == decimal
    if rounded and not is_decimal(decimal):
        return False
    try:
        expected, actual = precise(30).value(value, {}), precise(30).value(decimal, {})
    except NoNumber:
        return value[0] in WHOLES and value[0] == decimal[0]
    decimals = max((node[2] for node in nodes(decimal) if node[0] == "number" and node[2] is not None), default=0)
    return bool(abs(expected - actual) <= max(abs(expected) / 100, abs(precise(30).context.mpf(10) ** -decimals / 2)))


def are_amounts(item: Item) -> bool:
    """Whether the amounts of an item in several units are equal: `1.5 hours = 90 minutes`."""
    value = literal(item.chain[2][-1])
    for other, unit in item.amounts:
        size, factor = literal(other), conversion(item.unit, unit)
        if value is None or size is None or factor is None or size != value * factor:
            return False
    return True


# ----- a claim and its conditions


def scoped(claim: Claim) -> Scoped:
    r"""The claim and its side conditions: a domain at its end or in a set builder, and excluded values."""
    claim = system(claim)
    value = claim.items[0].chain[2][-1]
    is_family = value[0] == "builder" and len(value) == 3 and value[1][0] not in ("symbol", "chain")
    if len(claim.items) == 1 and is_family and (domain := _domain(value[2])):
        return Scoped(_claim(value[1]), domain)
    *items, last = claim.items
    if items and (domain := _domain(last.chain)):
        return Scoped(Claim(tuple(items), claim.joins if len(items) > 1 else frozenset()), domain)
    named = symbols(value)
    rest = [item for item in claim.items[1:] if not _is_exclusion(item.chain, named)]
    are_values = all(not item.chain[1] and literal(item.chain[2][0]) is not None for item in rest)
    is_first = claim.items[1:] and not claim.joins - {",", ";", "where", "and"}
    if is_first and are_values and _is_exclusion(claim.items[1].chain, named):
        return Scoped(Claim(claim.items[:1]), None, tuple(item.chain for item in claim.items[1:]))
    return Scoped(claim)


def _claim(value: Node) -> Claim:
    return Claim((Item(("chain", (), (value,))),))


def _domain(chain: Node) -> tuple[str, Node] | None:
    if chain[0] == "chain" and chain[1] == ("in",) and chain[2][0][0] == "symbol" and chain[2][1][0] == "numbers":
        return chain[2][0][1], chain[2][1]
    return None


def _is_exclusion(chain: Node, named: frozenset[str]) -> bool:
    _, operators, operands = chain
    return operators == ("ne",) and operands[0][0] == "symbol" and operands[0][1] in named


def system(claim: Claim) -> Claim:
    """The claim with the equations of a system as items, or with the text after the letter of a choice."""
    value = claim.items[0].chain[2][0]
    if value[0] == "choice":
        return value[2]
    if (
        len(claim.items) == 1
        and value[0] == "cases"
        and all(len(row) == 1 and row[0][0] == "chain" for row in value[1:])
    ):
        return Claim(tuple(Item(row[0]) for row in value[1:]), frozenset([","]))
    return claim


def by_names(claim: Claim) -> dict[str, Node]:
    """The values of `a=2, b=3` by name; empty if a name is missing or occurs twice."""
    found: dict[str, Node] = {}
    for item in claim.items:
        settled = settle(item)
        if settled is None or len(settled.names) != 1 or not is_true(settled) or settled.order:
            return {}
        (name,) = settled.names
        if name in found or item.chain[1][:1] == ("in",):
            return {}
        found[name] = settled.value
    return found if len(claim.items) > 1 else {}


def choice_of(claim: Claim) -> str:
    """The letter, if the claim is a choice; else empty."""
    if len(claim.items) != 1 or claim.items[0].chain[1]:
        return ""
    (value,) = claim.items[0].chain[2]
    value = value[3] if value[0] == "group" and len(value) == 4 else value
    name = (
        str(value[1]).upper() if value[0] in ("symbol", "choice") or (value[0] == "words" and len(value) == 2) else ""
    )
    return name if len(name) == 1 and name in "ABCDEFGHIJ" and (value[0] != "symbol" or value[1] == name) else ""


def is_nothing(claim: Claim) -> bool:
    r"""Whether the claim is that there is no solution: `\emptyset`, `no solutions`."""
    value = claim.items[0].chain[2][0]
    text = " ".join(map(str, value[1:])).casefold().rstrip(".") if value[0] == "words" else ""
    is_one = len(claim.items) == 1 and not claim.items[0].chain[1]
    return is_one and (value == ("set",) or _NOTHING.fullmatch(text) is not None)


# ----- values


def expanded(values: Sequence[Node]) -> Iterator[Node]:
    r"""Yields the values with both signs of `\pm`: `1 + x` and `1 - x` for `1 \pm x`."""
    for value in values:
        yield from (_with_sign(value, 1), _with_sign(value, -1)) if has_signs(value) else (value,)


def has_signs(tree: Node) -> bool:
    r"""Whether the tree is a value with `\pm` in it."""
    return any(node[0] == "pm" for node in nodes(tree)) and tree[0] not in ("group", "set", "matrix", "union")


def _with_sign(tree: Any, sign: int) -> Any:
    if not isinstance(tree, tuple):
        return tree
    if tree[:1] != ("pm",):
        return tuple(_with_sign(part, sign) for part in tree)
    inner = _with_sign(tree[2], sign)
    if sign * tree[1] > 0:
        return inner
    return ("number", -inner[1], inner[2]) if inner[0] == "number" else ("neg", inner)


def renamed(tree: Node, names: dict[str, str]) -> Node:
    """The tree with variables renamed."""
    return _replaced(tree, {old: ("symbol", new) for old, new in names.items()})


def _replaced(tree: Any, values: dict[str, Node]) -> Any:
    if not isinstance(tree, tuple):
        return tree
    if tree[:1] == ("symbol",):
        return values.get(tree[1], tree)
    return tuple(_replaced(part, values) for part in tree)


def simple(value: Node, gold: Node) -> Node:
    """The value in the spelling of the gold value: tuples for columns and unit vectors, without the name of a point."""
    value = _scaled(_components(value))
    is_tuple = gold[:3] == ("group", "(", ")") and len(gold) > 4
    if value[0] == "matrix" and gold[0] == "group":
        rows = value[1:]
        return (
            ("group", "(", ")", *(rows[0] if len(rows) == 1 else (row[0] for row in rows)))
            if _is_vector(rows)
            else value
        )
    if is_tuple and value[0] == "mul" and value[1][0] == "symbol" and _POINT.fullmatch(value[1][1]):
        return value[2] if value[2][:3] == ("group", "(", ")") else value
    if is_tuple and value[0] == "apply" and _POINT.fullmatch(value[1]) and len(value) > 3:
        return ("group", "(", ")", *value[2:])
    if value[0] == "set" and len(value) == 2 and gold[0] not in WHOLES:
        return value[1]
    return value


def _is_vector(rows: Node) -> bool:
    return len(rows) == 1 or all(len(row) == 1 for row in rows)


def _components(value: Node) -> Node:
    r"""The components of a sum of unit vectors: (2,-1) of `2\mathbf i-\mathbf j`; three if there is a k."""
    found: dict[str, Node] = {}
    for term in value[1:] if value[0] == "add" else (value,):
        vector = next((match[1] for node in nodes(term) if (match := _unit_vector(node))), "")
        factor = _factor(term)
        if not vector or factor is None or vector in found:
            return value
        found[vector] = factor
    return ("group", "(", ")", *(found.get(name, _ZERO) for name in ("ijk" if "k" in found else "ij")))


def _unit_vector(node: Node) -> re.Match[str] | None:
    return _UNIT_VECTOR.fullmatch(node[1]) if node[0] == "symbol" else None


def _factor(term: Node) -> Node | None:
    """The factor of a unit vector; None if the term has no such form."""
    if term[0] == "neg" and (inner := _factor(term[1])):
        return ("neg", inner) if inner[0] != "number" else ("number", -inner[1], None)
    if _unit_vector(term):
        return _ONE
    if term[0] == "mul" and _unit_vector(term[2]):
        return term[1]
    return ("div", inner, term[2]) if term[0] == "div" and (inner := _factor(term[1])) else None


def _scaled(tree: Node) -> Node:
    """A number times a matrix, multiplied out."""
    factor: Node = _ONE
    inner = tree
    if tree[0] == "mul":
        factor, inner = tree[1], tree[2]
    elif tree[0] == "neg":
        factor, inner = ("number", Fraction(-1), None), tree[1]
    elif tree[0] == "div":
        factor, inner = ("div", _ONE, tree[2]), tree[1]
    if inner[0] != "matrix" or factor == _ONE:
        return tree
    return ("matrix", *(tuple(_times(factor, part) for part in row) for row in inner[1:]))


def _times(factor: Node, part: Node) -> Node:
    a, b = literal(factor), literal(part)
    return ("number", a * b, None) if a is not None and b is not None else ("mul", factor, part)
