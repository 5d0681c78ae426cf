"""What a question says: its formulas, numbers and words, its choices, and the unit and the form that it asks for."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from grpo_lightning.plugins.verifier.equality import CONSTANTS, Context
from grpo_lightning.plugins.verifier.forms import ONE, normal
from grpo_lightning.plugins.verifier.grammar import Node, read_claim
from grpo_lightning.plugins.verifier.numbers import literal, nodes
from grpo_lightning.plugins.verifier.rules import rewriting, rule
from grpo_lightning.plugins.verifier.tokens import Unreadable
from grpo_lightning.plugins.verifier.units import UNITS, Unit
from grpo_lightning.plugins.verifier.words import BELOW_100, PARTS, SCALES

_WORD = rule(r"[^\W\d_]{3,}", "«How» «many» in 12 «hours»", "12 h")
_CAPITAL = rule(r"(?<![A-Za-z(°\\])[CK](?![A-Za-z)])", "x^2 + «C», «K» > 0", "20 °C", "(C) Carl")
_INTEGRAL = rule(
    r"(?i:\\i*int\b|integra|antiderivative|primitive|differential|constant|dx\b)", "«\\int» 2x «dx»", "an integer"
)
_INTEGERS = rule(
    r"(?i:\b(?:integers?|natural numbers?|sequences?|recurrence|series|\w*th term)\b|a_n|\\sum)",
    "the «7th term» of the «sequence»",
    "a real x",
)
_FORMULA = rule(
    r"\$\$?((?:\\\$|[^$])+)\$\$?|\\\(((?s:.+?))\\\)|\\\[((?s:.+?))\\\]", r"If «$x = 3$» and «\(y\)»", "x = 3"
)
_PLAIN = rule(
    r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|sqrt|sin|cos|tan|[\d{}()\[\]^_+*/=<>|!.,&%\\-]|\s(?=\S))+",
    "Solve« x + 3 = 7 »now",
    "now",
)
_NUMBER = rule(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?", "«1,234.50» of «7»", "two")
_CHOICE = rule(
    r"\\(?:text|mathrm)(?:bf|rm)?\s*\{\s*\(?([A-J])\)?[.:]?\s*\)?\s*\}|\(([A-J])\)|(?<![\w$\\({])([A-J])[.):](?=\s)",
    r"«\textbf{(A)}» 3 «(B)» 4 «C.» 5",
    "f(x)",
)
_EDGES = rewriting(
    r"\A(?:\\q?quad|\\hspace\{[^{}]*\}|\\[ ,;]|[~\s,;$]|\\\\)+|(?:\\q?quad|\\[ ,;]|[~\s,;.$]|\\\\)+\Z",
    "",
    r"\quad 3, \qquad -> 3",
)
_COUNTS = BELOW_100 | SCALES | PARTS | {"twice": 2, "double": 2, "both": 2, "percent": 100, "percentage": 100}

_UNIT = rule(
    r"(?i:\bhow many (?:more |fewer |total |whole )?([a-z]+)|\bin ([a-z]+)\s*[?.]"
    r"|\bin ([a-z]+),? (?:is|was|will|do|does|did)\b)",
    "«How many hours» is it?",
    "How long is it «in minutes?»",
)
_SIGNS = {
    "percent": ("percent", "%", "probab", "chance", "fraction", "ratio", "proportion", " rate"),
    "degree": ("degree", "angle", "°", "circ", "rotat"),
}
"""Stems of words for what is written with a sign."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The formulas of a question."""

    keys: frozenset[Node]
    """All formulas and their subtrees, each by its `key`."""
    sides: tuple[Node, ...] = ()
    """The formulas, and both sides of each equation, as written."""
    relations: tuple[Node, ...] = ()
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
    sides = tuple(side for chain in chains for side in chain[2])
    return Asked(frozenset(map(key, trees)) - {()}, sides, tuple(chain for chain in chains if chain[1]))


def key(tree: Node) -> Node:
    """What two spellings of a formula share, up to order, signs and factors that are numbers; () for whole numbers.

    A fraction, a decimal and a percentage are different spellings of a number.
    """
    value = literal(tree)
    if value is not None:
        is_form = value.denominator > 1 and tree[0] in ("number", "percent", "div")
        return ("form", tree[0], tree[0] == "number" and tree[2] is not None, value) if is_form else ()
    if tree[0] in ("symbol", "constant", "named", "words", "group", "set"):
        return ()
    rest = normal(tree)[1]
    if tree[0] == "root" and rest[0] == "symbol":
        return tree
    return () if rest == ONE or rest[0] in ("symbol", "constant") else rest


@lru_cache(maxsize=1 << 10)
def words_of(question: str) -> frozenset[str]:
    """The words of a question, in lower case."""
    return frozenset(word.casefold() for word in _WORD.findall(question))


@lru_cache(maxsize=1 << 10)
def numbers_of(question: str) -> frozenset[Fraction]:
    """The numbers that a question gives, in digits or in words: 2 of `half` and of `two`."""
    digits = [
        Fraction(match[0].replace(",", ""))
        for match in _NUMBER.finditer(question.replace("{,}", ",").replace(r",\!", ","))
    ]
    words = {form for word in words_of(question) for form in (word, word.removesuffix("s"))}
    return frozenset((*digits, *(Fraction(_COUNTS[word]) for word in words if word in _COUNTS)))


@lru_cache(maxsize=1 << 10)
def is_concrete(question: str) -> bool:
    """Whether a question gives numbers or formulas."""
    return bool(numbers_of(question) or formulas_of(question).keys or _FORMULA.search(question))


@lru_cache(maxsize=1 << 10)
def context_of(question: str) -> Context:
    """Whether the question is about integers, and which constants it uses itself."""
    letters = set() if _INTEGRAL.search(question) else {match[0] for match in _CAPITAL.finditer(question)}
    names = (name for name in CONSTANTS if name.partition("_")[0] in letters)
    return Context(_INTEGERS.search(question) is not None, frozenset(names))


@lru_cache(maxsize=1 << 10)
def unit_of(question: str) -> Unit:
    """The unit that a question asks for: hours of `How many hours`; empty if it names none or several."""
    words = [next(filter(None, match.groups())).casefold() for match in _UNIT.finditer(question)]
    names = {UNITS[word] for word in words if len(word) > 2 and word in UNITS}
    return ((names.pop(), 1),) if len(names) == 1 else ()


def allows(sign: str, question: str) -> bool:
    """Whether an answer may have a percent or degree sign: the question speaks of such, or it is not known."""
    return not words_of(question) or any(stem in question.casefold() for stem in _SIGNS[sign])


@lru_cache(maxsize=1 << 10)
def choices_in(question: str) -> dict[str, str]:
    """The text of each choice by its letter; empty if the letters do not run from A on."""
    found = list(_CHOICE.finditer(question))
    letters = "".join(match[match.lastindex or 0] for match in found)
    start = letters.rfind("A")
    run = found[start:] if start >= 0 else []
    if len(run) < 2 or letters[start:] != "ABCDEFGHIJ"[: len(run)]:
        return {}
    end = question.find("\n\n", run[-1].end())
    ends = [match.start() for match in run[1:]] + [end if end >= 0 else len(question)]
    texts = (_EDGES(question[match.end() : end]) for match, end in zip(run, ends, strict=True))
    return dict(zip(letters[start:], texts, strict=True))
