"""The normal form of a claim: one value with its names, its domain, what it excludes, and what is said to equal it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from grpo_lightning.plugins.rewards.verifier.equality import equal, is_close
from grpo_lightning.plugins.rewards.verifier.grammar import CHOICES, Claim, Item, Node, number_node, signed
from grpo_lightning.plugins.rewards.verifier.numbers import exact, literal, mapped, nodes, symbols
from grpo_lightning.plugins.rewards.verifier.question import key
from grpo_lightning.plugins.rewards.verifier.units import conversion
from grpo_lightning.plugins.rewards.verifier.words import word_set

WHOLES = word_set("group set matrix cases builder ratio time base numbers union minus meet dots chain mod words")
LISTS = ("list", "or", "both", "set")
"""Kinds of nodes without an order: `2, 3`, `2 or 3`, `2 and 3`, and the set of them."""
COUNTERS = frozenset("knm")


@dataclass(frozen=True, slots=True)
class Form:
    r"""The normal form of a claim: 3 of `x = 1 + 2 = 3 \approx 3.0`."""

    value: Node
    """A value; a list of `LISTS`; a `("record", (name, value), ...)` of `a=2, b=3`; a chain that is not solved."""
    item: Item
    """The only item, or the last one: it has the unit."""
    names: frozenset[str] = frozenset()
    """The names that the claim gives to the value."""
    links: tuple[Node, ...] = ()
    """The other operands, which the item claims to equal the value."""
    close: Node | None = None
    """The rounded value after an approximation sign."""
    domain: tuple[str, Node] | None = None
    r"""The counter and its set: `n \in \mathbb Z`."""
    excluded: tuple[Node, ...] = ()
    r"""Relations `x \ne 1` for variables of the value."""
    joins: frozenset[str] = frozenset()
    """The separators between the items."""


def form_of(claim: Claim, question_keys: frozenset[Node] | None = None) -> Form | None:
    r"""Returns the normal form of a claim; None if its items do not belong together, or one of them is false.

    The formulas of the question, `question_keys`, may be names, as may `m + n`. If there are none, only names may.
    """
    # The items without their side conditions, in one unit and with one modulus.
    items, domain, excluded = _scoped(claim)
    if "where" in claim.joins and not (domain or excluded):
        return None
    joins = claim.joins - {"where"} if len(items) > 1 or "trailing" in claim.joins else frozenset()
    items = _with_one_modulus(_in_one_unit(items) if joins == {"and"} else items)

    # One item: both signs of a value with `\pm` are a list.
    if len(items) == 1:
        form = _form_of_item(items[0], question_keys)
        is_one = form.value[0] == "chain" or not has_signs(form.value)
        value = form.value if is_one else ("list", *expanded([form.value]))
        return replace(form, value=value, domain=domain or form.domain, excluded=excluded, joins=joins - {"and"})

    # Several items: a list of relations, if one of them is not solved.
    forms = [_form_of_item(item, None) for item in items]
    kind = "or" if "or" in joins else "both" if "and" in joins else "list"
    domain = domain or forms[-1].domain
    last = replace(forms[-1], names=frozenset(), links=(), close=None, domain=domain, joins=joins)
    if any(form.item.operators and form.value is form.item.chain for form in forms):
        return replace(last, value=("or" if ";" in joins else kind, *(item.chain for item in items)))
    if not all(map(is_true, forms)):
        return None

    # Named values: several groups of them, one group, or one name with several values.
    records = _records(forms)
    if len(records) > 1 and claim.joins != {"or"}:
        return replace(last, value=("list", *records))
    if len(records) == 1 and kind != "or":
        return replace(last, value=records[0])
    is_one_unit = len({item.unit for item in items}) == 1
    if kind == "or" and is_one_unit and all(equal(forms[0].value, form.value) for form in forms):  # `3/4 or 0.75`
        return replace(forms[0], domain=domain)
    stems = {frozenset(name.partition("_")[0] for name in form.names) for form in forms if form.names}
    return replace(last, value=(kind, *expanded([form.value for form in forms]))) if len(stems) < 2 else None


def _records(forms: Sequence[Form]) -> list[Node]:
    """Returns the groups of named values in a list: two of `p=5, q=2; p=7, q=2`. A repeated name begins a group."""
    records: list[dict[str, Node]] = [{}]
    for form in forms:
        if records[-1].keys() & form.names:
            records.append({})
        records[-1] |= dict.fromkeys(sorted(form.names), form.value)
    are_alike = all(form.names for form in forms) and len({frozenset(record) for record in records}) == 1
    return [("record", *record.items()) for record in records] if are_alike and len(records[0]) > 1 else []


def _in_one_unit(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Returns `2 hours and 30 minutes` as hours; other items as they are."""
    total = Fraction()
    for item in items:
        factor = conversion(item.unit, items[0].unit)
        value = literal(item.operands[0])
        if factor is None or value is None or not item.unit:
            return items
        total += factor * value
    return (replace(items[0], chain=("chain", (), (number_node(total),))),)


def _with_one_modulus(items: tuple[Item, ...]) -> tuple[Item, ...]:
    r"""Returns the items of `x \equiv 2, 5 \pmod 7`, each with the name and the modulus."""
    kind, *last_value = items[-1].value
    if len(items) == 1 or kind != "mod":
        return items
    values = [*(item.value for item in items[:-1]), last_value[0]]
    names = items[0].operands[:-1]
    chains = [("chain", items[0].operators, (*names, ("mod", value, last_value[1]))) for value in values]
    return tuple(replace(item, chain=chain) for item, chain in zip(items, chains, strict=True))


# ----- one item


def _form_of_item(item: Item, question_keys: frozenset[Node] | None) -> Form:
    """Returns the form of one item; its value is the chain if that is a relation that is not solved."""
    # Three spellings of a solved equation.
    _, operators, operands = item.chain
    if operands[-1][0] == "mod":
        _, value, modulus = operands[-1]  # `x \equiv 2 \pmod 6` is `x = 2 + 6k`
        family = ("add", value, ("mul", modulus, ("symbol", "k")))
        return Form(family, item, frozenset(side[1] for side in operands[:-1]), domain=("k", ("numbers", "Z")))
    if operators == ("=",) and operands[1][0] == "symbol" and literal(operands[0]) is not None:
        operands = operands[::-1]  # `3 = t`
    if operators == ("in",) and operands[1][0] in WHOLES and (name := _names(operands[0], None)):
        return Form(operands[1], item, frozenset(name))

    # A chain of equations is solved if what stands left of the value are names, or values that equal it.
    unsolved = Form(item.chain, item)
    if set(operators) - {"=", "approx"}:
        return unsolved
    close = None
    if operators[-1:] == ("approx",) and not (len(operands) == 2 and _names(operands[0], question_keys)):
        *operands, close = operands
    *sides, value = operands
    names: set[str] = set()
    links = []
    for index, link in enumerate(sides):
        if name := _names(link, question_keys):
            names |= set(name)
        elif index or not symbols(link) | symbols(value) or (link[0] not in WHOLES and equal(link, value)):
            links.append(link)
        else:
            return unsolved
    return Form(value, item, frozenset(names), tuple(links), close)


def _names(tree: Node, question_keys: frozenset[Node] | None) -> tuple[str, ...]:
    r"""Returns the names on the left side of an equation: `x`, `f(3)`, `|AB|`, `(x, y)`, a formula of the question."""
    kind = tree[0]
    names = symbols(tree)
    if kind in ("symbol", "named"):
        return (tree[1],)
    if kind == "group" and tree[1:3] in (("(", ")"), ("[", "]")):
        children = [_names(child, question_keys) for child in tree[3:]]
        return tuple(child[0] for child in children) if all(len(child) == 1 for child in children) else ()
    is_upper = bool(names) and all(name[0].isupper() or " " in name or name == "m" for name in names)
    is_sum = kind in ("add", "ratio") and all(child[0] == "symbol" for child in tree[1:])
    is_in_question = question_keys is not None and (
        key(tree) in question_keys - {()} or (not question_keys and (is_sum or (names and kind in ("call", "abs"))))
    )
    is_quantity = is_upper and kind in ("call", "abs", "pow", "div", "mul")
    is_name = is_quantity or is_in_question or tree[:2] == ("call", "norm") or (is_sum and kind == "ratio")
    return (repr(tree),) if is_name else ()


def is_true(form: Form) -> bool:
    """Tells whether the value equals all its links, as far as numbers can tell."""
    value = form.value
    for link in form.links:
        inner = {node[0] for node in nodes(link)}
        if link[0] == "mul" and literal(link[1]) is not None and link[2][0] == "symbol":
            return False  # `m = 6n = 7`
        is_open = "pm" in inner or symbols(link)
        if not (is_open or inner & WHOLES - {"base"} or equal(link, value) or is_close(link, value, True)):
            return False
    return form.close is None or is_close(value, form.close, False)


# ----- conditions and choices


def _scoped(claim: Claim) -> tuple[tuple[Item, ...], tuple[str, Node] | None, tuple[Node, ...]]:
    """Returns the items of a claim without side conditions; the domain, at its end or in a set; the excluded values."""
    # A choice, and cases, are read as their contents.
    first, *later_items = claim.items
    value = first.value
    if value[0] == "choice":
        return _scoped(value[2])
    if not later_items and value[0] == "cases" and all(row[0][0] == "chain" for row in value[1:]):
        return tuple(Item(row[0]) for row in value[1:]), None, ()

    # A domain: in the condition of a set, or as the last item.
    is_family = not later_items and value[0] == "builder" and len(value) == 3 and value[1][0] not in ("symbol", "chain")
    if is_family and (domain := _domain(value[2])):  # `\{n\pi \mid n \in \mathbb Z\}`
        return (Item(("chain", (), (value[1],))),), domain, ()
    if later_items and (domain := _domain(later_items[-1].chain)):
        return claim.items[:-1], domain, ()

    # Excluded values, of a variable of the first item.
    kinds = [item.operators if item.operators else literal(item.value) is not None for item in later_items]
    is_exclusion = ("ne",) in kinds and all(kind in (("ne",), True) for kind in kinds)
    is_exclusion = is_exclusion and not claim.joins - {",", ";", "where", "and"}
    if is_exclusion and later_items[0].operands[0][1] in symbols(value):
        return claim.items[:1], None, tuple(item.chain for item in later_items)
    return claim.items, None, ()


def _domain(chain: Node) -> tuple[str, Node] | None:
    r"""Returns the counter and its set of `n \in \mathbb Z`; None for other relations."""
    kind, operators, operands = chain
    if kind == "chain" and operators == ("in",) and operands[0][0] == "symbol" and operands[1][0] == "numbers":
        return operands[0][1], operands[1]
    return None


def choice_of(claim: Claim) -> str:
    """Returns the letter, if the claim is a choice; else empty."""
    item = claim.items[0]
    value = item.operands[0]
    if len(claim.items) != 1 or item.operators:
        return ""
    value = value[3] if value[0] == "group" and len(value) == 4 else value
    is_letter = value[0] in ("symbol", "choice") or (value[0] == "words" and len(value) == 2)
    name = str(value[1]).upper() if is_letter else ""
    return name if len(name) == 1 and name in CHOICES and (value[0] != "symbol" or value[1] == name) else ""


# ----- values


def expanded(values: Sequence[Node]) -> Iterator[Node]:
    r"""Yields the values with both signs of `\pm`: `1 + x` and `1 - x` for `1 \pm x`."""
    for value in values:
        yield from [_with_sign(value, 1), _with_sign(value, -1)] if has_signs(value) else [value]


def has_signs(tree: Node) -> bool:
    r"""Tells whether the tree is a value with `\pm` in it."""
    return any(node[0] == "pm" for node in nodes(tree)) and tree[0] not in ("group", "set", "matrix", "union")


def _with_sign(tree: Node, sign: int) -> Node:
    r"""Returns a tree with `+` for `\pm` and `-` for `\mp`, or the other way round."""

    def change(node: Node) -> Node:
        return signed("+" if sign * node[1] > 0 else "-", node[2]) if node[:1] == ("pm",) else node

    return mapped(tree, change)


def simple(value: Node, gold: Node) -> Node:
    """Returns the value in the spelling of the gold value: tuples for columns and unit vectors, no name of a point."""
    is_tuple = gold[:3] == ("group", "(", ")") and len(gold) > 4
    value = _multiplied(value, 3 if is_tuple and len(gold) == 6 else 2)
    if gold[0] == "matrix" and value[0] == "group" and len(value) > 4:  # `[[1, 2], [3, 4]]`, or a column as `[1, 2]`
        rows = [row[3:] if row[0] == "group" else (row,) for row in value[3:]]
        return ("matrix", *rows)
    if is_tuple and value[0] == "matrix" and (len(value) == 2 or all(len(row) == 1 for row in value[1:])):
        return ("group", "(", ")", *(value[1] if len(value) == 2 else (row[0] for row in value[1:])))
    if is_tuple and value[0] == "mul" and value[1][0] == "symbol" and value[2][:3] == ("group", "(", ")"):
        return value[2] if len(value[1][1].rstrip("_'0123456789")) == 1 else value
    if value[0] == "pow" and value[1][0] == "group" and value[2] == ("symbol", "T"):  # `(1, 2)^T`
        return simple(value[1], gold)
    return value[1] if value[0] == "set" and len(value) == 2 and gold[0] not in WHOLES else value


def _multiplied(tree: Node, size: int) -> Node:
    """Returns a multiple of a matrix as a matrix, a fraction of a vector in any spelling as a tuple."""
    kind, *children = tree
    tree = _components(tree, size)
    if tree[0] == "group" or kind not in ("mul", "neg", "div"):
        return tree
    inner = _multiplied(children[-1 if kind == "mul" else 0], size)
    factor = (
        children[0]
        if kind == "mul"
        else ("neg", number_node(1))
        if kind == "neg"
        else ("div", number_node(1), children[1])
    )
    if inner[0] == "matrix":
        return ("matrix", *(tuple(_worked_out(("mul", factor, child)) for child in row) for row in inner[1:]))
    is_tuple = inner[:3] == ("group", "(", ")") and not symbols(factor)
    if not is_tuple or (exact(factor) or Fraction(1, 2)).denominator == 1:  # but `2(1, 3)` is unfinished
        return tree
    return (*inner[:3], *(_worked_out(("mul", factor, child)) for child in inner[3:]))


def _worked_out(tree: Node) -> Node:
    """Returns the tree as one number if it has an exact value."""
    value = exact(tree)
    return tree if value is None else number_node(value)


def _components(value: Node, size: int) -> Node:
    r"""Returns the components of a sum of unit vectors, at least `size`: (2,-1) of `2\mathbf i-\mathbf j`."""
    components: dict[str, Node] = {}
    for term in value[1:] if value[0] == "add" else (value,):
        inner = term[1] if term[0] == "neg" else term
        factor, vector = (inner[1], inner[2]) if inner[0] == "mul" else (number_node(1), inner)
        *marks, name = vector[1].split() if vector[0] == "symbol" else [""]  # `bold i`, `hat i`
        if not marks or name not in ("i", "j", "k") or name in components:
            return value
        components[name] = _worked_out(("neg", factor)) if term[0] == "neg" else factor
    return (
        "group",
        "(",
        ")",
        *(components.get(name, number_node(0)) for name in "ijk"[: 3 if "k" in components else size]),
    )
