"""The formulas, the words and the numbers of a question."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from grpo_lightning.plugins.verifier.equality import CONSTANTS, Context
from grpo_lightning.plugins.verifier.forms import ONE, split
from grpo_lightning.plugins.verifier.grammar import Node, read_claim
from grpo_lightning.plugins.verifier.numbers import exact, literal, nodes
from grpo_lightning.plugins.verifier.rules import rewriting, rule
from grpo_lightning.plugins.verifier.tokens import Unreadable
from grpo_lightning.plugins.verifier.units import word_set


@dataclass(frozen=True, slots=True)
class Asked:
    """The formulas of a question."""

    parts: frozenset[Node]
    """All formulas and their subtrees, each in `canonical` form."""
    multiples: frozenset[tuple[Fraction, Node]]
    """The same as pairs of a number and the rest, from `multiple`."""
    forms: frozenset[Node]
    """The numbers that are not whole, each with its notation, from `number_form`."""
    sides: tuple[Node, ...]
    """The formulas, and both sides of each equation, as written."""
    relations: tuple[Node, ...]
    """The equations and inequalities."""


@lru_cache(maxsize=1 << 10)
def formulas_of(question: str) -> Asked:
    """The formulas of a question, between dollar signs and in plain text."""
    texts = [next(group for group in match.groups() if group is not None) for match in _FORMULA.finditer(question)]
    texts += [match[0] for match in _PLAIN.finditer(_FORMULA.sub(" . ", question))]
    texts += [text.replace("[", "(").replace("]", ")") for text in texts if "[" in text]
    chains = []
    for text in texts:
        for brackets in (True, False):
            try:
                claim = read_claim(text.strip(" .,:;?"), frozenset(), brackets)
            except Unreadable:
                continue
            chains += [item.chain for item in claim.items]
            break
    trees = [node for chain in chains for node in nodes(chain) if node[0] != "chain" or node[1]]
    return Asked(
        frozenset(map(canonical, trees)) - {()},
        frozenset(filter(None, map(multiple, trees))),
        frozenset(map(number_form, trees)) - {()},
        tuple(side for chain in chains for side in chain[2]),
        tuple(chain for chain in chains if chain[1]),
    )


def is_concrete(question: str) -> bool:
    """Whether a question gives numbers or formulas."""
    return bool(numbers_of(question) or formulas_of(question).parts or _FORMULA.search(question))


def expressions(question: str) -> frozenset[Node]:
    """The formulas in a question and their parts in canonical form."""
    return formulas_of(question).parts


def number_form(tree: Node) -> Node:
    """The notation (decimal, percentage or fraction) and the value of a number that is not whole; () for others."""
    value = literal(tree)
    if value is None or value.denominator == 1 or tree[0] not in ("number", "percent", "div"):
        return ()
    return ("form", "decimal" if tree[0] == "number" and tree[2] is not None else tree[0], value)


def multiple(tree: Node) -> tuple[Fraction, Node] | None:
    """A formula as a number times the rest; None if there is nothing to compute."""
    if tree[0] not in _COMPOUND or tree[0] == "chain" or exact(tree) is not None:
        return None
    number, rest = split(tree)
    return None if rest == ONE or rest[0] in ("symbol", "constant") else (number, rest)


def canonical(tree: Node) -> Node:
    """One tree for all orders of terms and factors; () if there is nothing to compute."""
    if exact(tree) is not None and tree[0] in ("number", "neg", "percent"):
        return ()
    return _sorted(tree) if tree[0] in _COMPOUND else ()


_COMPOUND = word_set("add mul div pow root call fact abs apply big matrix chain union meet minus builder pm ratio")


def _sorted(tree: Node) -> Node:
    if not tree:
        return tree
    parts = tuple(
        (
            _sorted(part)
            if part and isinstance(part[0], str)
            else tuple(_sorted(p) if isinstance(p, tuple) else p for p in part)
        )
        if isinstance(part, tuple)
        else part
        for part in tree
    )
    if tree[0] == "number":
        return tree[:2]
    if tree[0] in ("add", "mul"):
        flat: list[Node] = []
        for part in parts[1:]:
            flat += part[1:] if part[0] == tree[0] else [part]
        flat = [part for part in flat if part != ("number", Fraction(tree[0] == "mul"))]
        return (tree[0], *sorted(flat, key=repr)) if len(flat) > 1 else (flat or [parts[1]])[0]
    if tree[0] in ("div", "pow") and parts[2] == ("number", Fraction(1)):
        return parts[1]
    if tree[0] == "neg":
        return ("mul", *sorted([("number", Fraction(-1)), *parts[1:]], key=repr))
    return parts


@lru_cache(maxsize=1 << 10)
def words_of(question: str) -> frozenset[str]:
    """The words of a question, in lower case."""
    return frozenset(word.casefold() for word in _WORD.findall(question))


@lru_cache(maxsize=1 << 10)
def numbers_of(question: str) -> frozenset[Fraction]:
    """The numbers that a question gives, in digits or in words: 2 of `half` and of `two`, 12 of `a dozen`."""
    digits = (Fraction(match[0].replace(",", "")) for match in _NUMBER.finditer(_WITH_PLAIN_COMMAS(question)))
    counts = (_COUNTS.get(word) or _COUNTS.get(word.removesuffix("s")) for word in words_of(question))
    return frozenset((*digits, *(Fraction(number) for number in counts if number)))


def context_of(question: str) -> Context:
    """The context for comparing formulas: whether variables are integers, and which constants the question uses."""
    letters = set() if _INTEGRAL.search(question) else {match[0] for match in _CAPITAL.finditer(question)}
    names = (name for name in CONSTANTS if name.partition("_")[0] in letters)
    return Context(_INTEGERS.search(question) is not None, frozenset(names))


_WORD = rule(r"[^\W\d_]{3,}", "«How» «many» in 12 «hours»", "12 h")
_CAPITAL = rule(r"(?<![A-Za-z(°\\])[CK](?![A-Za-z)])", "x^2 + «C», «K» > 0", "20 °C", "(C) Carl")
_INTEGRAL = rule(
    r"\\i*int\b|integral|integrat|antiderivative|primitive|differential|constant|dx\b",
    r"«\int» 2x «dx»",
    "an «antiderivative» of f",
    "an integer",
    flags=re.IGNORECASE,
)
_INTEGERS = rule(
    r"\b(?:integers?|natural numbers?|sequences?|recurrence|series|\w*th term)\b|a_n|\\sum",
    "the «7th term» of the «sequence»",
    "a real x",
    flags=re.IGNORECASE,
)
_FORMULA = rule(
    r"\$\$?((?:\\\$|[^$])+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", r"If «$x = 3$» and «\(y\)»", "x = 3", flags=re.DOTALL
)
_PLAIN = rule(
    r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|sqrt|sin|cos|tan|[\d{}()\[\]^_+*/=<>|!.,&%\\-]|\s(?=\S))+",
    "Solve« x + 3 = 7 »now",
    "now",
)
_NUMBER = rule(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?", "«1,234.50» of «7»", "two")
_WITH_PLAIN_COMMAS = rewriting(r"(?:\{,\}|,\\!)(?=\d)", ",", r"1{,}234 and 5,\!678 -> 1,234 and 5,678", "{,} -> {,}")
_CARDINALS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
_COUNTS = {
    **{word: value for value, word in enumerate(_CARDINALS.split(), 2)},
    **{"twice": 2, "double": 2, "half": 2, "halve": 2, "pair": 2, "couple": 2, "both": 2},
    **{"third": 3, "thrice": 3, "triple": 3, "fourth": 4, "quarter": 4, "fifth": 5, "sixth": 6, "seventh": 7},
    **{"eighth": 8, "ninth": 9, "tenth": 10, "dozen": 12, "percent": 100, "percentage": 100, "hundred": 100},
    **{"day": 24, "week": 7, "weekly": 7, "month": 12, "year": 12, "hour": 60, "minute": 60, "second": 60},
    **{"foot": 12, "feet": 12, "yard": 3, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "thousand": 1000},
    **{"decade": 10, "century": 100, "cent": 100, "meter": 100, "metre": 100, "kilometer": 1000, "kilogram": 1000},
}  # fmt: skip
