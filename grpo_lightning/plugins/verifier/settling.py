"""Finds the value that an item settles on, 3 of `x = 1 + 2 = 3`, with its names and its other links."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from grpo_lightning.plugins.verifier import equality
from grpo_lightning.plugins.verifier.asked import canonical
from grpo_lightning.plugins.verifier.grammar import Claim, Item, Node
from grpo_lightning.plugins.verifier.numbers import NoNumber, is_decimal, literal, nodes, precise, symbols
from grpo_lightning.plugins.verifier.rules import rule
from grpo_lightning.plugins.verifier.units import word_set

WHOLES = word_set("group set matrix cases builder ratio time base numbers union minus meet dots chain mod words")


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


def settle(item: Item, loose: bool = False, asked: frozenset[Node] = frozenset()) -> Settled | None:
    r"""The value that an item settles on; None for a relation that is not solved.

    Args:
        item: The item.
        loose: Whether `m + n` and `AB \cdot CD` count as names.
        asked: The formulas of the question, which count as names if `loose`.
    """
    _, operators, operands = item.chain
    if operators == ("in",) and operands[1][0] in WHOLES and (name := _name(operands[0], False)):
        return Settled(operands[1], frozenset(name), name if operands[0][0] == "group" else ())
    if set(operators) - {"=", "approx"}:
        return None
    close = None
    if "approx" in operators:
        if operators.index("approx") < len(operators) - 1:
            return None
        if len(operands) == 2 and _name(operands[0]) is not None:
            return Settled(operands[1], frozenset(_name(operands[0]) or ()))
        close, operands = operands[-1], operands[:-1]
    *before, value = operands
    names: set[str] = set()
    order: tuple[str, ...] = ()
    links = []
    for index, link in enumerate(before):
        name = _name(link, loose)
        if name is None and loose and canonical(link) in asked:
            name = (repr(link),)
        if name is None and link[0] == "pow" and value[0] == "matrix" and link[1][0] == "symbol":
            name = (repr(link),)
        if name is not None:
            names |= set(name)
            if link[0] == "group":
                order = name
        elif not symbols(link) or index > 0 or any(node[0] == "big" for node in nodes(link)):
            links.append(link)
        else:
            return None
    if value[0] == "words" and before:
        return None
    return Settled(value, frozenset(names), order, tuple(links), close)


def with_argument(gold: Settled, answer: Settled) -> Settled:
    """The answer with the variable of the gold answer: `f(t) = t^2` becomes `f(x) = x^2`."""
    if len(gold.names) != 1 or len(answer.names) != 1 or gold.names == answer.names:
        return answer
    gold_name, answer_name = (_APPLIED.fullmatch(next(iter(settled.names))) for settled in (gold, answer))
    if not gold_name or not answer_name or gold_name[1] != answer_name[1] or gold_name[2] in symbols(answer.value):
        return answer
    return Settled(renamed(answer.value, {answer_name[2]: gold_name[2]}), gold.names)


_APPLIED = rule(r"([A-Za-z]'*)\(([a-z])\)", "«f(x)»", "«f'(t)»", "f(3)")


def base_of(name: str) -> str:
    """The name without its subscript: `x` of `x_1`."""
    return name.partition("_")[0]


def _name(tree: Node, loose: bool = True) -> tuple[str, ...] | None:
    r"""The names that are the left side of an equation, or None: `x`, `f(3)`, `\sin A`, `|AB|`, `m+n`, `(x, y)`."""
    kind = tree[0]
    if kind == "symbol":
        return (tree[1],)
    if kind == "named":
        return (tree[1],)
    if kind == "apply":
        return (repr(tree),)
    if kind == "words":
        return (" ".join(map(str, tree[1:])),)
    if kind == "group" and tree[1] == "(" and len(tree) > 3:
        parts = [_name(part) for part in tree[3:]]
        return tuple(part[0] for part in parts if part) if all(part and len(part) == 1 for part in parts) else None
    if kind == "group" and tree[1:3] == ("[", "]") and len(tree) == 4:
        return _name(tree[3])
    if kind == "abs" and symbols(tree):
        return (repr(tree),)
    if kind == "call" and symbols(tree) and tree[1] not in ("exp", "ln"):
        return (repr(tree),)
    if kind == "ratio" and all(part[0] == "symbol" for part in tree[1:]):
        return (repr(tree),)
    if kind == "add" and loose and all(part[0] == "symbol" for part in tree[1:]):
        return (repr(tree),)
    if (
        kind == "mul"
        and loose
        and all(
            part[0] == "symbol" and (part[1][:1].isupper() or part[1] == "m" or part[1].startswith("angle"))
            for part in tree[1:]
        )
    ):
        return (repr(tree),)
    return None


def is_true_chain(settled: Settled) -> bool:
    """Whether the value equals all its links, as far as numbers can tell."""
    for link in settled.links:
        if any(node[0] == "big" for node in nodes(link)):
            continue
        if symbols(link):
            if settled.value[0] in WHOLES or (
                link[0] == "mul" and literal(link[1]) is not None and link[2][0] == "symbol"
            ):
                return link[0] == settled.value[0]
            if link[0] in WHOLES:
                return False
            continue
        if link[0] in WHOLES and link[0] != settled.value[0]:
            return False
        if any(node[0] in WHOLES for node in nodes(link)):
            continue
        if any(node[0] == "call" and node[1] in ("det", "norm", "conj") for node in nodes(link)):
            continue
        if not values_agree(link, settled.value) and not _is_close(link, settled.value, True):
            return False
    return settled.close is None or _is_close(settled.value, settled.close, False)


def values_agree(left: Node, right: Node) -> bool:
    """Whether two trees are identical, or have the same number as value."""
    left_number, right_number = literal(left), literal(right)
    if left_number is not None and right_number is not None:
        return left_number == right_number
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


def by_names(claim: Claim) -> dict[str, Node]:
    """The values of `a=2, b=3` by name; empty if a name is missing or occurs twice."""
    found: dict[str, Node] = {}
    for item in claim.items:
        settled = settle(item)
        if settled is None or len(settled.names) != 1 or not is_true_chain(settled) or settled.order:
            return {}
        (name,) = settled.names
        if name in found or (item.chain[1] and item.chain[1][0] == "in"):
            return {}
        found[name] = settled.value
    return found if len(claim.items) > 1 else {}


def choice_of(claim: Claim) -> str:
    """The letter, if the claim is a choice; else empty."""
    if len(claim.items) != 1 or claim.items[0].chain[1]:
        return ""
    (value,) = claim.items[0].chain[2]
    if value[0] == "choice":
        return str(value[1])
    if value[0] == "group" and len(value) == 4:
        value = value[3]
    name = value[1] if value[0] == "symbol" else value[1].upper() if value[0] == "words" and len(value) == 2 else ""
    return name if len(name) == 1 and name in "ABCDEFGHIJ" else ""


def system(claim: Claim) -> Claim:
    """The claim with the equations of a system as items."""
    if len(claim.items) != 1 or claim.items[0].chain[1] or claim.items[0].chain[2][0][0] != "cases":
        return claim
    rows = claim.items[0].chain[2][0][1:]
    if not all(len(row) == 1 and row[0][0] == "chain" for row in rows):
        return claim
    return Claim(tuple(Item(row[0]) for row in rows), frozenset([","]))


def chosen(claim: Claim) -> Claim:
    """The claim of the text after the letter of a choice: 12 of `(C) 12`."""
    value = claim.items[0].chain[2][0]
    return value[2] if value[0] == "choice" else claim


def condition(claim: Claim) -> tuple[str, Node] | None:
    r"""The counter and its set, if the last item is a condition such as `n \in \mathbb Z`."""
    if len(claim.items) < 2:
        return None
    _, operators, operands = claim.items[-1].chain
    if operators == ("in",) and operands[0][0] == "symbol" and operands[1][0] == "numbers":
        return operands[0][1], operands[1]
    return None


def has_signs(tree: Node) -> bool:
    r"""Whether the tree is a value with `\pm` in it."""
    return any(node[0] == "pm" for node in nodes(tree)) and tree[0] not in ("group", "set", "matrix", "union")


def expanded(values: Sequence[Node]) -> Iterator[Node]:
    r"""Yields the values with both signs of `\pm`: `1 + x` and `1 - x` for `1 \pm x`."""
    for value in values:
        if has_signs(value):
            yield _with_sign(value, 1)
            yield _with_sign(value, -1)
        else:
            yield value


def _with_sign(tree: Node, sign: int) -> Node:
    if tree[0] == "pm":
        inner = _with_sign(tree[2], sign)
        if sign * tree[1] > 0:
            return inner
        return ("number", -inner[1], inner[2]) if inner[0] == "number" else ("neg", inner)
    return tuple(
        _with_sign(part, sign) if isinstance(part, tuple) and part and isinstance(part[0], str) else part
        for part in tree
    )


def renamed(tree: Node, names: dict[str, str]) -> Node:
    """The tree with variables renamed."""
    if tree[:1] == ("symbol",):
        return ("symbol", names.get(tree[1], tree[1]))
    return tuple(renamed(part, names) if isinstance(part, tuple) else part for part in tree)


def with_counter(gold: Node, answer: Node) -> Node:
    r"""The answer with the counter of the gold answer, if that has a pi: `2n\pi` becomes `2k\pi`."""
    gold_names, answer_names = symbols(gold), symbols(answer)
    if (
        gold_names == answer_names
        or len(gold_names) != 1
        or len(answer_names) != 1
        or not (gold_names | answer_names) <= _COUNTERS
    ):
        return answer
    has_pi = any(node == ("constant", "pi") for node in nodes(gold))
    return renamed(answer, {next(iter(answer_names)): next(iter(gold_names))}) if has_pi else answer


_COUNTERS = frozenset("knm")


def bound_names(builder: Node) -> list[str]:
    """The variables of a set builder: those that its conditions contain."""
    return sorted({name for condition in builder[2:] for name in symbols(condition)} & symbols(builder[1]))


def padded(parts: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The hours, minutes and seconds of a time, with zeros for missing parts."""
    return (*parts, Fraction(), Fraction())[:3]


def vector(tree: Node) -> Node:
    """A matrix of one row or column as a tuple."""
    if tree[0] != "matrix":
        return tree
    if len(tree) == 2:
        return ("group", "(", ")", *tree[1])
    return ("group", "(", ")", *(row[0] for row in tree[1:])) if all(len(row) == 1 for row in tree[1:]) else tree


def scaled(tree: Node) -> Node:
    """A number times a matrix, multiplied out."""
    factor, inner = None, tree
    if tree[0] == "mul" and tree[2][0] in ("matrix", "group"):
        factor, inner = tree[1], tree[2]
    elif tree[0] == "neg" and tree[1][0] in ("matrix", "group"):
        factor, inner = ("number", Fraction(-1), None), tree[1]
    elif tree[0] == "div" and tree[1][0] == "matrix":
        factor, inner = ("div", ("number", Fraction(1), None), tree[2]), tree[1]
    if factor is None or inner[0] != "matrix":
        return tree

    def times(part: Node) -> Node:
        a, b = literal(factor), literal(part)
        return ("number", a * b, None) if a is not None and b is not None else ("mul", factor, part)

    return ("matrix", *(tuple(times(part) for part in row) for row in inner[1:]))
