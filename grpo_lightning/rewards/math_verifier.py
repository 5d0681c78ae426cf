"""The rule-based reward for mathematics: right or wrong, decided by value and not by spelling."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.rewards.base import OK, Reward, RewardResult
from grpo_lightning.rewards.extraction import extract_answer, whole_turn
from grpo_lightning.rewards.reading import (
    MAX_CHARS,
    MAX_NORMALISED_CHARS,
    NAME_LIST,
    TEXT_COMMAND,
    Reading,
    canonical,
    read,
    same_number,
    without_unit,
)
from grpo_lightning.rewards.workers import ERROR, WorkerPool
from grpo_lightning.types import Question, Sample

log = logging.getLogger(__name__)

NO_ANSWER, UNPARSEABLE, TOO_LONG, GOLD_BAD = "no_answer", "unparseable", "too_long", "gold_bad"

_EQUIVALENCE = f"{Path(__file__).with_name('equivalence.py')}:equivalence"
_CACHE_SIZE = 1 << 17
_MAX_DEPTH = 15
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
            good = gold in pairs and len(gold) <= MAX_CHARS
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
    if len(answer) > MAX_CHARS:
        return TOO_LONG
    right, said = read(gold), read(answer)
    if len(said.text) > MAX_NORMALISED_CHARS:
        return TOO_LONG
    if right.name and said.name and right.name != said.name:
        return DIFFERENT
    if right.number is not None:
        if said.number is not None:
            return EQUAL if same_number(right, said) else DIFFERENT
        sums = without_unit(said.text)  # "5 + 3 = 8" says 8, provided that it is true
        *steps, last = sums.split("=")
        stated = read(last.strip())
        is_right = stated.number is not None and same_number(right, stated)
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


def _formulas(right: Reading, said: Reading) -> tuple[str, str]:
    """The two as the worker gets them: the `x=` that only one of them has says nothing."""
    texts = right.text, said.text
    if ("=" in right.text) != ("=" in said.text) or r"\in" in "".join(texts):
        texts = _NAMES.sub(r"\1", right.text), _NAMES.sub(r"\1", said.text)
    formulas = [without_unit(text).replace("%", r"\%") for text in texts]
    return formulas[0], formulas[1]


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


_CHOICE = re.compile(rf"(?:{TEXT_COMMAND}\{{)?\(?([A-J])(?:[).:]|$)")
_ARITHMETIC = re.compile(r"(?:[\d\s+*/().,{}^-]|\\frac|\\times|\\cdot|\\div)+")
_NAMES = re.compile(rf"(^|[,;]\s*|\b(?:and|or)\b\}}?\s*){NAME_LIST}\s*(?:=|\\in(?![a-z]))", re.ASCII)
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
