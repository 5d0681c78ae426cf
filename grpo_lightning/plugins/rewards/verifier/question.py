"""Reads a question: its formulas, numbers and words, its choices, and the unit and the form that it wants."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from grpo_lightning.plugins.rewards.verifier.forms import ONE, normal
from grpo_lightning.plugins.rewards.verifier.grammar import Node, read_claim, read_unit
from grpo_lightning.plugins.rewards.verifier.numbers import literal, nodes
from grpo_lightning.plugins.rewards.verifier.tokens import Unreadable
from grpo_lightning.plugins.rewards.verifier.units import Unit
from grpo_lightning.plugins.rewards.verifier.words import BELOW_100, PARTS, SCALES, word_set

_WORD = re.compile(r"[^\W\d_]{3,}")
_INTEGRALS = word_set(r"\int integra antiderivative differential constant dx")
_INTEGERS = ("integer", "natural number", "sequence", "recurrence", "series", "th term", "a_n", "\\sum")
_FORMULA = re.compile(r"\$\$?((?:\\\$|[^$])+)\$\$?|\\\(((?s:.+?))\\\)|\\\[((?s:.+?))\\\]")
_PLAIN = re.compile(
    r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|sqrt|sin|cos|tan|[\d{}()\[\]^_+*/=<>|!.,&%\\-]|\s(?=\S))+"
)
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_CHOICE = re.compile(
    r"\\(?:text|mathrm)(?:bf|rm)?\s*\{\s*\(?([A-J])\)?[.:]?\s*\)?\s*\}|\(([A-J])\)|(?<![\w$\\({])([A-J])[.):](?=\s)"
)
_QUAD = re.compile(r"\\q?quad(?![a-z])|\\hspace\{[^{}]*\}|\\[ ,;\\]")
_COUNTS = BELOW_100 | SCALES | PARTS | {"twice": 2, "double": 2, "both": 2, "percent": 100, "percentage": 100}
_UNIT = re.compile(
    r"(?i:\b(how many (?:more |fewer |total |whole )?|number of |in |to ))"
    r"([A-Za-z¢°][A-Za-z/^{}\d]*(?: [A-Za-z/]+){0,4})"
)
_TARGET = re.compile(
    r"(?i:\b(?:find|determine|compute|calculate|evaluate|what is|solve for)"
    r"(?: the)?(?: (?:positive|integer|exact|real))*(?: values? of)?) \$?([A-Za-z])\$?(?![\w'(\\]| ?[-+*/^=_]| and\b)"
)
_WANTED = {
    "form": re.compile(
        r"(?i:\b(?:expand|multiply out|factor(?!ial)|partial fraction|complet\w+ the square|vertex form"
        r"|rectangular form|a ?\+ ?bi|radian|positive exponents|slope[- ]intercept|power of|(?:scientific )?notation"
        r"|form[\s$]*(?:[a-z] = )?[a-z]?\s*(?:\\left)?\([a-z]\s*[-+]\s*[a-z](?:\\right)?\)\^)|\by\s*=\s*mx)"
    ),
    "notation": re.compile(
        r"(?i:\b(?:as|to|in|into)\s+(?:an?\s+)?(?:\w+\s+){0,2}(?:decimal|fraction|percent|mixed number))"
    ),
    "simplest": re.compile(r"(?i:\b(?:reduce|simplif|simplest|lowest|rationali[sz]|radical form))"),
    "order": re.compile(
        r"(?i:\bin (?:(?!any)\w+[ -])*?order\b(?! (?:to|that|for)\b)|\b(?:least|smallest|lowest|greatest|largest) to\b)"
    ),
}
"""Forms that a question may want: the gold answer's skeleton, a fraction or a decimal, lowest terms, an order."""
_AFTER_UNIT = frozenset(["", "is", "was", "will", "do", "does", "did"])
"""Words that follow a unit after `in`, unless the unit is a plural: no noun, as in `in second place`."""
_VARIABLE = re.compile(r"(?<![A-Za-z(°\\])[A-Za-z](?![A-Za-z)])")
_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}")
_SIGNS = {
    "percent": ("percent", "%", "probab", "chance", "fraction", "ratio", "proportion", " rate"),
    "degree": word_set("degree angle ° circ rotat"),
}
"""Stems of words for quantities that are written with a sign."""

per_question = lru_cache(maxsize=1 << 10)
"""Remembers the results of a function for the latest questions."""


@dataclass(frozen=True, slots=True)
class Formulas:
    """The formulas of a question."""

    keys: frozenset[Node]
    """All formulas and their subtrees, each by its `key`."""
    relations: tuple[Node, ...] = ()
    """The equations and inequalities."""


@per_question
def formulas_of(question: str) -> Formulas:
    """Returns the formulas of a question, between dollar signs and in plain text."""
    # Formulas between dollar signs, then in plain text, then all of them with round brackets for square ones.
    texts = [next(filter(None, match.groups())) for match in _FORMULA.finditer(question)]
    texts += [match[0] for match in _PLAIN.finditer(_FORMULA.sub(" . ", question))]
    texts += [text.replace("[", "(").replace("]", ")") for text in texts if "[" in text]

    # In brackets `3,500` is two numbers or, if that cannot be read, one.
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
    return Formulas(frozenset(map(key, trees)) - {()}, tuple(chain for chain in chains if chain[1]))


def key(tree: Node) -> Node:
    """Returns a key that spellings of a formula share, up to order, signs and numeric factors; () for whole numbers.

    A fraction, a decimal and a percentage are different spellings of a number.
    """
    value = literal(tree)
    if value is not None:
        is_form = value.denominator > 1 and tree[0] in ("number", "percent", "div")
        return ("form", tree[0], tree[0] == "number" and tree[2] is not None, value) if is_form else ()
    if tree[0] in ("symbol", "constant", "named", "words", "group", "set"):
        return ()
    unscaled = normal(tree)[1]
    if tree[0] == "root" and unscaled[0] == "symbol":
        return tree
    return () if unscaled == ONE or unscaled[0] in ("symbol", "constant") else unscaled


@per_question
def words_of(question: str) -> frozenset[str]:
    """Returns the words of a question, in lower case, and the letters of its formulas."""
    formulas = (_TEXT.sub(" ", match[0]) for match in _FORMULA.finditer(question))
    letters = (letter for formula in formulas for letter in _VARIABLE.findall(formula))
    return frozenset((*(word.casefold() for word in _WORD.findall(question)), *letters))


@per_question
def numbers_of(question: str) -> frozenset[Fraction]:
    """Returns the numbers that a question gives, in digits or in words: 2 of `half` and of `two`."""
    numbers = _NUMBER.findall(question.replace("{,}", ",").replace(r",\!", ","))
    digits = (Fraction(number.replace(",", "")) for number in numbers)
    words = {form for word in words_of(question) for form in (word, word.removesuffix("s"))}
    return frozenset((*digits, *(Fraction(_COUNTS[word]) for word in words if word in _COUNTS)))


@per_question
def kind_of(question: str) -> tuple[bool, bool]:
    """Tells whether the question is about integers, and whether it is, or may be, about integrals."""
    return speaks_of(question, _INTEGERS), not words_of(question) or speaks_of(question, _INTEGRALS)


@per_question
def unit_of(question: str) -> Unit:
    """Returns the unit that a question wants: hours of `How many hours`; empty if it names none or several."""
    units = set[Unit]()
    for match in _UNIT.finditer(_TEXT.sub(r"\1", question).replace("$", "")):
        unit, last_text, next_text = read_unit(match[2])
        is_plural = last_text.endswith(("s", "t"))
        is_noun = match[1].casefold() in ("in ", "to ") and not is_plural and next_text not in _AFTER_UNIT
        is_letter = len(last_text) == 1 and last_text.isupper()  # `from P to L`
        if unit and not is_noun and not is_letter:
            units.add(unit)
    return units.pop() if len(units) == 1 else ()


def wants(question: str, *forms: str) -> bool:
    """Tells whether the question wants one of the forms of `_WANTED`."""
    return any(_WANTED[form].search(question) for form in forms)


@per_question
def variables_of(question: str) -> frozenset[str]:
    """Returns the variables that a question wants; an `a` without dollar signs is an article."""
    return frozenset(match[1] for match in _TARGET.finditer(question) if "$" in match[0] or match[1] not in "aAI")


def allows(sign: str, question: str) -> bool:
    """Tells whether an answer may have a percent or degree sign: the question speaks of such, or it is not known."""
    return not words_of(question) or speaks_of(question, _SIGNS[sign])


def speaks_of(question: str, stems: Iterable[str]) -> bool:
    """Tells whether one of the words, or a form of it, is in the question."""
    return any(stem in question.casefold() for stem in stems)


@per_question
def choices_in(question: str) -> dict[str, str]:
    """Returns the text of each choice by its letter; empty if the letters do not run from A on."""
    letter_matches = list(_CHOICE.finditer(question))
    letters = "".join(match[match.lastindex or 0] for match in letter_matches)
    start = letters.rfind("A")
    run = letter_matches[start:] if start >= 0 else []
    if len(run) < 2 or letters[start:] != "ABCDEFGHIJ"[: len(run)]:
        return {}
    end = question.find("\n\n", run[-1].end())
    ends = [match.start() for match in run[1:]] + [end if end >= 0 else len(question)]
    texts = (_QUAD.sub("", question[match.end() : end]).strip(" ~,;.$\n") for match, end in zip(run, ends, strict=True))
    return dict(zip(letters[start:], texts, strict=True))
