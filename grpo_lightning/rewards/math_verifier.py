"""The rule-based reward for mathematics: right or wrong, decided by value and not by spelling."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lightning.rewards.base import OK, Reward, RewardFailure, RewardResult
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
from grpo_lightning.rewards.workers import ERROR, TIMEOUT, WorkerPool
from grpo_lightning.types import Question, Sample, UsageError

log = logging.getLogger(__name__)

NO_ANSWER, UNPARSEABLE, TOO_LONG, GOLD_BAD = "no_answer", "unparseable", "too_long", "gold_bad"

_EQUIVALENCE = f"{Path(__file__).with_name('equivalence.py')}:equivalence"
_CACHE_SIZE = 1 << 17
_MAX_DEPTH = 15
_MIN_COUNTED = 100
"""Samples before a share of timeouts means something."""
EQUAL, DIFFERENT = "equal", "different"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about an answer, by whom and why."""

    outcome: str
    """`equal`, `different`, or the status that kept it from being compared."""
    stage: str
    """Where: `gold`, `extraction`, `guards`, `text`, `numbers`, `words` or `worker`."""
    why: str
    """In words."""


class MathVerifier(Reward):
    """1 if the final answer of the completion has the value of the gold answer, else 0.

    Args:
        timeout: Processor seconds a comparison may take in a worker process, where all go but plain numbers and
            words; by the clock it may take half as much again.
        memory_limit_mb: Memory one worker may use on top of what its imports take (about 70), in MiB.
        workers: Number of worker processes.
        max_timeouts: Largest share of timeouts among the latest samples, at least 100 of them, before the run stops:
            a timeout is worth 0, and many of them say that right answers are, too.
        weight: Factor of this reward in the total. 0 only watches: scored and logged, never learned from.
        name: Its name in the metrics.
    """

    finds_answers = True

    def __init__(
        self,
        timeout: float = 1.0,
        memory_limit_mb: int = 512,
        workers: int = 2,
        max_timeouts: float = 0.05,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        if not 0 <= max_timeouts <= 1:
            raise UsageError(f"max_timeouts={max_timeouts}: give a share from 0 to 1")
        self.max_timeouts = max_timeouts
        self._pool = WorkerPool(workers, 1.5 * timeout, memory_limit_mb, cpu_seconds=timeout)
        self._known: dict[tuple[str, str], str] = {}  # in the order of their last use
        self._good_golds: dict[str, bool] = {}
        self._counted: list[tuple[int, int]] = []  # timeouts and samples of the latest batches

    def prepare(self, questions: Sequence[Question]) -> None:
        """Starts a worker, compares every gold answer with itself, and warns of each that is not equal to itself.

        Raises:
            LoadError: A worker cannot import math-verify.
        """
        self._pool.load(_EQUIVALENCE)
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
        return self.report(samples, *self.grade(samples))

    def report(
        self, samples: Sequence[Sample], answers: Sequence[str | None], verdicts: Sequence[Verdict]
    ) -> RewardResult:
        """What `grade` says as values and statuses."""
        values, statuses, names = [], [], []
        for sample, answer, verdict in zip(samples, answers, verdicts, strict=True):
            outcome = verdict.outcome
            values.append(math.nan if outcome == GOLD_BAD else float(outcome == EQUAL))
            statuses.append(OK if outcome in (EQUAL, DIFFERENT) else outcome)
            # A right answer is the gold answer, however it was written: then a vote counts them as one.
            names.append(canonical(sample.answer if outcome == EQUAL else answer) if answer else None)
        return RewardResult(values, statuses, names)

    def grade(self, samples: Sequence[Sample]) -> tuple[list[str | None], list[Verdict]]:
        """The answer that each completion gives, and what is decided about it."""
        self._check_golds([sample.answer for sample in samples])
        answers = [extract_answer(whole_turn(sample)) for sample in samples]
        verdicts: list[Verdict | tuple[str, str]] = []
        for sample, answer in zip(samples, answers, strict=True):
            if not self._good_golds[sample.answer]:
                verdicts.append(_GOLD_BAD)
            else:
                verdicts.append(_NO_ANSWER if answer is None else decide(sample.answer, answer))
        by_worker = self._compare([verdict for verdict in verdicts if isinstance(verdict, tuple)])
        return answers, [
            verdict if isinstance(verdict, Verdict) else _by_worker(by_worker[verdict], verdict) for verdict in verdicts
        ]

    def check(self, result: RewardResult) -> None:
        """Counts timeouts.

        Raises:
            RewardFailure: More than `max_timeouts` of the latest samples timed out.
        """
        self._counted.append((result.status.count(TIMEOUT), len(result.status)))
        while sum(count for _, count in self._counted[1:]) >= _MIN_COUNTED:
            del self._counted[0]
        timeouts, count = (sum(column) for column in zip(*self._counted, strict=True))
        if count >= _MIN_COUNTED and timeouts > self.max_timeouts * count:
            raise RewardFailure(
                f"reward {self.name}: {timeouts} of the latest {count} samples timed out, more than "
                f"max_timeouts={self.max_timeouts}, and each got 0. Either the machine is overloaded (then give the "
                f"reward a larger `timeout`, now {self._pool.cpu_seconds:g} s), or the policy learned to write what is "
                "slow to compare (look at its completions)"
            )

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
        """The outcome for each distinct pair of texts, from memory or from a worker."""
        known = self._known
        outcomes = {}
        for pair in dict.fromkeys(pairs):
            if pair in known:
                outcomes[pair] = known[pair] = known.pop(pair)
        unknown = [pair for pair in dict.fromkeys(pairs) if pair not in outcomes]
        for pair, outcome in zip(unknown, self._pool.map(_EQUIVALENCE, [list(pair) for pair in unknown]), strict=True):
            if outcome.status == ERROR:
                outcomes[pair] = UNPARSEABLE
            else:
                outcomes[pair] = outcome.value if outcome.status == OK else outcome.status
            if outcome.status in (OK, ERROR):  # the others depend on the machine's load
                known[pair] = outcomes[pair]
        while len(known) > _CACHE_SIZE:
            del known[next(iter(known))]
        return outcomes


_NO_ANSWER = Verdict(NO_ANSWER, "extraction", r"no \boxed{}, <answer>, #### or 'answer is' after the reasoning")
_GOLD_BAD = Verdict(GOLD_BAD, "gold", "the gold answer cannot be read: it is empty, too long or no mathematics")
_TOO_LONG = Verdict(TOO_LONG, "guards", f"longer than {MAX_CHARS} characters, or {MAX_NORMALISED_CHARS} respelt")
_OTHER_NAME = Verdict(DIFFERENT, "text", "it is about another variable")
_SAME_NUMBER = Verdict(EQUAL, "numbers", "the same number")
_OTHER_NUMBER = Verdict(DIFFERENT, "numbers", "another number")
_NO_NUMBER = Verdict(UNPARSEABLE, "numbers", "the gold answer is a number; this is none, or has yet to be computed")
_SAME_WORDS = Verdict(EQUAL, "words", "the same words or choice")
_OTHER_WORDS = Verdict(DIFFERENT, "words", "not the words or the choice of the gold answer")
_SAME_TEXT = Verdict(EQUAL, "text", "the same in one spelling")
_OTHER_TEXT = Verdict(DIFFERENT, "text", "a time, a ratio or a number in another base: compared letter by letter")
_OTHER_CASE = Verdict(DIFFERENT, "text", "the same but for small and capital letters")
_COSTLY_ANSWER = Verdict(UNPARSEABLE, "guards", "it has yet to be computed, or could be too costly to compare")


def decide(gold: str, answer: str) -> Verdict | tuple[str, str]:
    """The verdict, or the two texts for a worker where words and exact rational numbers cannot decide.

    A gold answer that is a number wants a number: a sum, product, integral or gcd that only restates the
    question is `unparseable`, whatever its value.
    """
    if len(answer) > MAX_CHARS:
        return _TOO_LONG
    right, said = read(gold), read(answer)
    if len(said.text) > MAX_NORMALISED_CHARS:
        return _TOO_LONG
    if right.name and said.name and right.name != said.name:
        return _OTHER_NAME
    if right.number is not None:
        if said.number is not None:
            return _SAME_NUMBER if same_number(right, said) else _OTHER_NUMBER
        return _sum_of(right, said) or _NO_NUMBER
    if right.words:
        return _SAME_WORDS if right.words == _spoken(right, said) else _OTHER_WORDS
    if right.text == said.text or right.body == said.body:
        return _SAME_TEXT
    if not right.is_formula:
        return _OTHER_TEXT
    if right.text.casefold() == said.text.casefold():
        return _OTHER_CASE
    if not _is_safe(said.text, right.text):
        return _COSTLY_ANSWER
    return _formulas(right, said)


def _sum_of(right: Reading, said: Reading) -> tuple[str, str] | None:
    """For a worker: `5 + 3 = 8` says 8, provided that it is true. `0 = 0` says nothing about `x = 0`."""
    chain = without_unit(said.text)
    *steps, last = chain.split("=")
    stated = read(last.strip())
    if stated.number is None or not same_number(right, stated) or not steps:
        return None
    if right.name and all(read(step.strip()).number is not None for step in steps):
        return None
    if not all(_ARITHMETIC.fullmatch(step) for step in steps) or not _is_safe(chain, ""):
        return None
    return right.body, chain


def _spoken(right: Reading, said: Reading) -> str:
    """The words of an answer, or the letter of a choice with its text: `(C) 12`, but not `(C) or (D)`."""
    choice = _CHOICE.match(said.text) if len(right.words) == 1 else None
    if choice and not _OTHER_CHOICE.search(said.text, choice.end()):
        return choice[1].casefold()
    return (said.words or said.body).casefold()


def _by_worker(outcome: str, pair: tuple[str, str]) -> Verdict:
    return Verdict(outcome, "worker", f"{_OUTCOMES.get(outcome, outcome)}: `{pair[1]}` with `{pair[0]}`")


_OUTCOMES = {
    EQUAL: "equal by computer algebra",
    DIFFERENT: "different by computer algebra",
    UNPARSEABLE: "computer algebra cannot read one of them",
    TIMEOUT: "comparing them took too long",
    "memory": "comparing them took too much memory",
    "crash": "comparing them ended two workers",
}


def _formulas(right: Reading, said: Reading) -> tuple[str, str]:
    """The two as the worker gets them: a name that both give to everything, or that only one gives, says nothing."""
    texts = right.text, said.text
    names = [["".join(match[2].split()) for match in _NAMES.finditer(text)] for text in texts]
    one_name = len(set(names[0])) == 1 and set(names[0]) == set(names[1])
    if one_name or ("=" in texts[0]) != ("=" in texts[1]) or r"\in" in "".join(texts):
        texts = _NAMES.sub(r"\1", texts[0]), _NAMES.sub(r"\1", texts[1])
        if len(set(names[0])) == len(names[0]) > 1 and not names[1] and not _BRACKETS.search("".join(texts)):
            texts = f"({texts[0]})", f"({texts[1]})"  # `a = 2, b = 3` has an order, `2, 3` has none
    formulas = [_PERCENT.sub(r"\\frac{\1}{100}", without_unit(text)).replace("%", r"\%") for text in texts]
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
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z\\])(?:[A-J]|[Oo]r|[Aa]nd|[Nn]o|[Nn]ot)(?![A-Za-z])")
_ARITHMETIC = re.compile(r"(?:[\d\s+*/().,{}^-]|\\frac|\\times|\\cdot|\\div)+")
_NAMES = re.compile(rf"(^|[,;]\s*|\b(?:and|or)\b\s*\}}?\s*)({NAME_LIST})\s*(?:=|\\in(?![a-z]))\s*", re.ASCII)
_BRACKETS = re.compile(r"[(\[]|\\\{")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
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
