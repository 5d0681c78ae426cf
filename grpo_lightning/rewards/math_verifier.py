"""The rule-based reward for mathematics: right or wrong, decided by value and not by spelling."""

import logging
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from grpo_lightning.rewards.base import OK, Reward, RewardResult
from grpo_lightning.rewards.extraction import extract_answer, whole_turn
from grpo_lightning.rewards.workers import ERROR, WorkerPool
from grpo_lightning.types import Question, Sample

log = logging.getLogger(__name__)

NO_ANSWER, UNPARSEABLE, TOO_LONG, GOLD_BAD = "no_answer", "unparseable", "too_long", "gold_bad"

_EQUIVALENCE = f"{Path(__file__).with_name('equivalence.py')}:equivalence"
_CACHE_SIZE = 1 << 17
_MAX_CHARS, _MAX_NORMALISED_CHARS, _MAX_DEPTH, _MAX_DIGITS = 2000, 600, 15, 200
EQUAL, DIFFERENT = "equal", "different"


class MathVerifier(Reward):
    """1 if the final answer of the completion has the value of the gold answer, else 0.

    Args:
        timeout: Seconds a comparison may take in a worker process, where all go but plain numbers and words.
        memory_limit_mb: Memory one worker may use on top of what its imports take, in MiB.
        workers: Number of worker processes.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.
    """

    finds_answers = True

    def __init__(
        self,
        timeout: float = 2.0,
        memory_limit_mb: int = 1024,
        workers: int = 2,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        self._pool = WorkerPool(workers, timeout, memory_limit_mb)
        self._known: dict[tuple[str, str], str] = {}  # in the order of their last use
        self._good_golds: dict[str, bool] = {}

    def prepare(self, questions: Sequence[Question]) -> None:
        """Compares every gold answer with itself, and warns of each that is not even equal to itself."""
        self._check_golds([question.answer for question in questions])
        bad = [question for question in questions if not self._good_golds[question.answer]]
        for question in bad[:20]:
            log.warning(
                "reward %s cannot read the gold answer %.200r of %s: its samples get no reward (status %s)",
                self.name, question.answer, question.source or "a question without source", GOLD_BAD,
            )  # fmt: skip
        if len(bad) > 20:
            log.warning("reward %s: %d gold answers more could not be read", self.name, len(bad) - 20)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Grades `samples`.

        Status `ok` (graded), or, worth 0, `no_answer`, `unparseable` (not mathematics, or no plain number
        though the gold answer is one), `too_long`, `timeout`, `memory` and `crash` (of the worker). Only
        `gold_bad` gives NaN.
        """
        self._check_golds([sample.answer for sample in samples])
        answers = [extract_answer(whole_turn(sample)) for sample in samples]
        verdicts: list[str | tuple[str, str]] = []
        for sample, answer in zip(samples, answers, strict=True):
            if not self._good_golds[sample.answer]:
                verdicts.append(GOLD_BAD)
            else:
                verdicts.append(NO_ANSWER if answer is None else decide(sample.answer, answer))
        by_worker = self._compare([verdict for verdict in verdicts if isinstance(verdict, tuple)])
        values, statuses, names = [], [], []
        for sample, answer, verdict in zip(samples, answers, verdicts, strict=True):
            verdict = by_worker[verdict] if isinstance(verdict, tuple) else verdict
            values.append(math.nan if verdict == GOLD_BAD else float(verdict == EQUAL))
            statuses.append(OK if verdict in (EQUAL, DIFFERENT) else verdict)
            # A right answer is the gold answer, however it was written: then a vote counts them as one.
            names.append(canonical(sample.answer if verdict == EQUAL else answer) if answer else None)
        return RewardResult(values, statuses, names)

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def _check_golds(self, golds: Sequence[str]) -> None:
        unseen = [gold for gold in dict.fromkeys(golds) if gold not in self._good_golds]
        pairs = {gold: _formulas(reading, reading) for gold in unseen if (reading := read(gold)).text}
        compared = self._compare([pair for gold, pair in pairs.items() if read(gold).is_formula])
        for gold in unseen:
            good = gold in pairs and len(gold) <= _MAX_CHARS
            self._good_golds[gold] = good and compared.get(pairs[gold], EQUAL) == EQUAL

    def _compare(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """The verdict of each distinct pair of texts, from memory or from a worker."""
        verdicts = {}
        for pair in dict.fromkeys(pairs):
            if pair in self._known:
                verdicts[pair] = self._known[pair] = self._known.pop(pair)
        unknown = [pair for pair in dict.fromkeys(pairs) if pair not in verdicts]
        outcomes = self._pool.map(_EQUIVALENCE, [list(pair) for pair in unknown])
        for pair, outcome in zip(unknown, outcomes, strict=True):
            if outcome.status == ERROR:
                verdicts[pair] = UNPARSEABLE
            else:
                verdicts[pair] = outcome.value if outcome.status == OK else outcome.status
            if outcome.status in (OK, ERROR):  # the others depend on the machine's load
                self._known[pair] = verdicts[pair]
        while len(self._known) > _CACHE_SIZE:
            del self._known[next(iter(self._known))]
        return verdicts


def decide(gold: str, answer: str) -> str | tuple[str, str]:
    """The verdict, or the two texts for a worker where words and exact rational numbers cannot decide.

    A gold answer that is a number wants a number: a sum, product, integral or gcd that only restates the
    question is `unparseable`, whatever its value.
    """
    if len(answer) > _MAX_CHARS:
        return TOO_LONG
    right, said = read(gold), read(answer)
    if len(said.text) > _MAX_NORMALISED_CHARS:
        return TOO_LONG
    if right.name and said.name and right.name != said.name:
        return DIFFERENT
    if right.number is not None:
        if said.number is not None:
            return EQUAL if _same(right, said) else DIFFERENT
        sums = _without_unit(said.text)  # "5 + 3 = 8" says 8, provided that it is true
        *steps, last = sums.split("=")
        stated = read(last.strip())
        is_right = stated.number is not None and _same(right, stated)
        if is_right and steps and all(_ARITHMETIC.fullmatch(step) for step in steps) and _is_safe(sums, ""):
            return right.body, sums
        return UNPARSEABLE
    if right.words:
        choice = _CHOICE.match(said.text) if len(right.words) == 1 else None
        spoken = (choice[1] if choice else said.words or said.body).casefold()
        return EQUAL if right.words == spoken else DIFFERENT
    if right.text == said.text or right.body == said.body:
        return EQUAL
    if not right.is_formula or right.text.casefold() == said.text.casefold():
        return DIFFERENT  # a time or a ratio, a number in another base; x is not X
    if not _is_safe(said.text, right.text):
        return UNPARSEABLE
    return _formulas(right, said)


def canonical(answer: str) -> str:
    """A spelling that answers of equal value share, as far as exact numbers and words can tell."""
    reading = read(answer)
    return str(reading.number) if reading.number is not None else reading.words or reading.body


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says."""

    text: str
    """Normalised LaTeX."""
    name: str = ""
    """`x` of `x=3`."""
    body: str = ""
    """`3` of `x=3` or `3\\text{ cm}`; else the text."""
    number: Fraction | None = None
    """Its exact value, if it is a plain number."""
    words: str = ""
    """The words, if it is `yes`, `\\text{Monday}` or the choice `(C)`; in lower case."""

    @property
    def is_formula(self) -> bool:
        """Whether only computer algebra can compare it."""
        return self.number is None and not self.words and not _LITERAL.fullmatch(self.body)


@lru_cache(maxsize=1 << 16)
def read(answer: str) -> Reading:
    """Reads a gold answer or a model's: one that is too long for an answer, only as text."""
    if _PLAIN.fullmatch(answer):
        return Reading(answer, "", answer, Fraction(answer.replace(",", "")))
    text = normalise(answer[: _MAX_CHARS + 1])
    if len(text) > _MAX_NORMALISED_CHARS:
        return Reading(text, "", text)
    named = _NAMED.fullmatch(text)
    name, body = ("".join(named[1].split()), named[2].rpartition("=")[2].strip()) if named else ("", text)
    body = _without_unit(body)
    number = _number(body) if len(body) <= _MAX_DIGITS else None
    return Reading(text, name, body, number, "" if number is not None else _words(body))


def normalise(text: str) -> str:
    """One spelling of what LaTeX has many for, without layout, marked units, currency and degree signs."""
    if not text.isascii():
        text = "".join(_UNICODE.get(c) or (str(unicodedata.decimal(c)) if c.isdecimal() else c) for c in text)
    text = " ".join(text.split())
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    before, approx, after = text.partition(r"\approx")
    if approx:
        text = f"{before}={after}" if _NAMED.fullmatch(f"{before}=0") else before.strip() or after
    return " ".join(text.split()).rstrip(" .,;:").removeprefix("**").removesuffix("**")


def _same(right: Reading, said: Reading) -> bool:
    a, b = right.number, said.number
    assert a is not None
    assert b is not None
    if a == b:
        return True
    # 0.0833333333333 is 1/12 as far as it goes; a whole number is never "as far as it goes".
    decimal = "." in right.body or "." in said.body
    return decimal and a.denominator > 1 and b.denominator > 1 and abs(a - b) <= max(abs(a), abs(b)) / 10**10


def _without_unit(text: str) -> str:
    unit = _MARKED_UNIT.fullmatch(text) or _WORD_UNIT.fullmatch(text)
    return unit[1].strip() if unit and not _NOT_A_UNIT.search(unit[2]) else text


def _formulas(right: Reading, said: Reading) -> tuple[str, str]:
    """The two as the worker gets them: the `x=` that only one of them has says nothing."""
    texts = right.text, said.text
    if ("=" in right.text) != ("=" in said.text) or r"\in" in "".join(texts):
        texts = _NAMES.sub(r"\1", right.text), _NAMES.sub(r"\1", said.text)
    formulas = [_without_unit(text).replace("%", r"\%") for text in texts]
    return formulas[0], formulas[1]


def _number(text: str) -> Fraction | None:
    """The value of an integer, decimal, fraction, mixed number, power or scientific notation."""
    if text.endswith("%"):
        number = _number(text[:-1].rstrip())
        return None if number is None else number / 100
    if text[:1] in ("-", "+"):
        number = _number(text[1:].lstrip()) if text[1:2] not in ("-", "+") else None
        return -number if number is not None and text[0] == "-" else number
    if text[:1] + text[-1:] in ("()", "{}"):
        return _number(text[1:-1].strip())
    if _PLAIN.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if match := _FRACTION.fullmatch(text):
        whole, *parts = match.groups()
        top, bottom = (_number(part.strip()) for part in parts if part is not None)
        if top is None or not bottom or (whole and (top < 0 or bottom < 0)):
            return None
        return Fraction(whole or 0) + top / bottom
    if match := _SLASH.fullmatch(text):
        top, bottom = Fraction(match[2].replace(",", "")), Fraction(match[3].replace(",", ""))
        return Fraction(match[1] or 0) + top / bottom if bottom else None
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa, exponent = match[1] or match[2] or "1", int(match[3] or match[4])
        return Fraction(mantissa.replace(",", "")) * Fraction(10) ** exponent
    if match := _POWER.fullmatch(text):
        base, exponent = int(match[1]), int(match[2] or match[3])
        small = abs(exponent) * len(match[1]) <= _MAX_DIGITS
        return Fraction(base) ** exponent if small and (base or exponent > 0) else None
    if match := _REPEATING.fullmatch(text):
        whole, fixed, repeated = match[1] or "0", match[2], match[3]
        return Fraction(f"{whole}.{fixed}0") + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return None


def _words(text: str) -> str:
    match = _MARKED_WORDS.fullmatch(text)
    plain = (match[1] if match else text).strip()
    if plain[:1] + plain[-1:] == "()":
        plain = plain[1:-1].strip()
    is_words = _WORDS.fullmatch(plain) and (match or re.search("[A-Za-z]{3}", plain) or _CHOICE_GOLD.fullmatch(plain))
    return " ".join(plain.casefold().split()) if is_words and not _FUNCTIONS.search(plain) else ""


def _is_safe(text: str, gold: str) -> bool:
    """Whether computer algebra on `text` looks cheap. What slips through costs one worker its `timeout`."""
    if any(pattern.search(text) for pattern in _COSTLY):
        return False
    if any(operator not in gold for operator in _OPERATORS.findall(text)):
        return False
    depth = deepest = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        deepest = max(deepest, depth)
    return deepest <= _MAX_DEPTH


_DECIMAL = r"(?:[1-9]\d{0,2}(?:,\d{3}){1,60}(?:\.\d{0,200})?|\d{1,200}(?:\.\d{0,200})?|\.\d{1,200})"
_GROUP = r"(?:\s*\{((?:[^{}]|\{[^{}]*\})*)\}|\s*(\d))"
_PLAIN = re.compile(_DECIMAL, re.ASCII)
_FRACTION = re.compile(rf"(\d+)?\s*\\frac{_GROUP}{_GROUP}", re.ASCII)
_SLASH = re.compile(rf"(?:(\d+)\s+)?({_DECIMAL})\s*/\s*(-?{_DECIMAL})", re.ASCII)
_SCIENTIFIC = re.compile(
    rf"(?:(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*|({_DECIMAL})[eE])"
    r"(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))",
    re.ASCII,
)
_POWER = re.compile(r"(\d+)\s*\^\s*(?:\{\s*(-?\d{1,3})\s*\}|(\d))", re.ASCII)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", re.ASCII)

_TEXT = r"\\(?:text|textrm|mbox|hbox|mathrm|rm)\s*"
_MARKED_UNIT = re.compile(rf"(.*?\S)\s*{_TEXT}\{{([^{{}}]*)\}}\s*(?:\^\s*\{{?\d\}}?)?")
_SHORT_UNIT = r"(?:cm|mm|km|ft|mi|yd|kg|mg|lb|oz|ml|hr)\b"
_WORD_UNIT = re.compile(rf"(.*?[\d}}%)])\s+((?:[A-Za-z]{{3}}|{_SHORT_UNIT})[A-Za-z0-9 ,.'/-]*)")
_NOT_A_UNIT = re.compile(
    r"\b(?:or|and|to|than|not|if|plus|minus|times|over|mod|divided|squared|cubed|factorial|choose|sqrt|sin|cos|tan|log|exp"
    r"|pi|theta|alpha|beta|hundred|thousand|[mbtr]+illion|dozens?|half|halves|thirds?|quarters?|fourths?|fifths?)\b",
    re.IGNORECASE,
)
_MARKED_WORDS = re.compile(rf"{_TEXT}\{{([^{{}}]*)\}}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9 ,.:'-]*")
_FUNCTIONS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|infty|infinity|pi)\b")
_CHOICE_GOLD = re.compile("[A-J]")
_CHOICE = re.compile(rf"(?:{_TEXT}\{{)?\(?([A-J])(?:[).:]|$)")
_LITERAL = re.compile(r"\d+(?::\d+)+|\d+_\{?\d+\}?")
_ARITHMETIC = re.compile(r"(?:[\d\s+*/().,{}^-]|\\frac|\\times|\\cdot|\\div)+")

_NAME = r"\\?[A-Za-z]+(?:_(?:\w|\{[^{}]{1,20}\}))?(?:\([A-Za-z0-9]\))?'*"
_NAME_LIST = rf"(?:{_NAME}(?:\s*:\s*{_NAME})*|\(\s*{_NAME}(?:\s*,\s*{_NAME}){{0,8}}\s*\))"
_NAMED = re.compile(rf"({_NAME_LIST})\s*(?:=|\\in(?![a-z]))\s*([^=,;]*(?:=[^=,;]*)*|[^=]*)", re.ASCII)
_NAMES = re.compile(rf"(^|[,;]\s*|\b(?:and|or)\b\}}?\s*){_NAME_LIST}\s*(?:=|\\in(?![a-z]))", re.ASCII)

_OPERATORS = re.compile(
    r"\\(?:operatorname|i*int|oint|sum|prod|lim|gcd|lcm|max|min|det|sup|inf|arg|Gamma|[bp]?mod)(?![A-Za-z])"
)
_COSTLY = [
    re.compile(r"__|[#`\"]"),
    re.compile(r"\d{200}"),
    re.compile(r"\^\s*[{(]*-?\d{4}"),
    re.compile(r"\d[})]*\^[\s{(]*-?\d+[})]*\s*\^"),
    re.compile(r"\d{4}[})\s]*!|![})\s]*!|binom[^!]*\d{4}"),
]

_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!\s*", ""),
        (r"\\[,;:]|\\?\$|^\s*\\[(\[]|\\[)\]]\s*$|\\displaystyle", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?", ""),
        (r"(?<!\\)\\ |~|\\q?quad(?![A-Za-z])", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\{\s*,\s*\}", ","),
        (r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree", ""),
        (r"\\(?:textbf|mathbf|boldsymbol|bm|textit|mathit|emph)\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:mathrm|text)\s*\{\s*([a-zA-Z]|[-+.\d]+)\s*\}", r"\1"),
        (r"\s*\\text\s*\{\s*(?:percent|\\?%)\s*\}|\s*\bpercent\b|\\%", "%"),
        (r"(?<=[\w})])\*\*(?=[\w({-])", "^"),
        (
            r"[\[(]\s*\\begin\s*\{array\}\s*\{[clr|\s]*\}(.*?)\\end\s*\{array\}\s*[\])]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"\\(begin|end)\s*\{bmatrix\}", r"\\\1{pmatrix}"),
        (r"\\langle(?![a-z])", "("),
        (r"\\rangle(?![a-z])", ")"),
        (r"\\leq?(?![a-z])", r"\\le "),
        (r"\\geq?(?![a-z])", r"\\ge "),
    )
]
_UNICODE = {
    "−": "-", "–": "-", "±": r"\pm ", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ",
    "√": r"\sqrt ", "²": "^{2}", "³": "^{3}", "½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34", "％": "%",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
    "∅": r"\emptyset ", "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "°": r"^\circ",
}  # fmt: skip
