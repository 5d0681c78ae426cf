"""The rule-based reward for mathematics, which compares answers by value and not by spelling."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lightning.plugins.rewards.verifier.extraction import extract_answer
from grpo_lightning.plugins.rewards.verifier.reading import MAX_CHARS, canonical, plain_number
from grpo_lightning.plugins.rewards.verifier.value_comparison import DIFFERENT, EQUAL, GOLD_BAD, RESTATED, UNPARSEABLE
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward, RewardFailure
from grpo_lightning.sandbox.pool import WorkerPool
from grpo_lightning.types import Question, Sample, Status, require

log = logging.getLogger(__name__)

_COMPARE = "grpo_lightning.plugins.rewards.verifier.value_comparison:compare"
_EXPLAIN = "grpo_lightning.plugins.rewards.verifier.value_comparison:explain"
_CACHE_SIZE = 1 << 17
_MIN_COUNTED = 100
"""The fewest questions over which the fraction of timeouts is checked."""

Pair = tuple[str, str, str]
"""A gold answer, an answer and their question, as sent to a worker."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about an answer, with the stage that made it and the reason."""

    outcome: str
    """`equal`, `different`, or the status that prevented a comparison."""
    stage: str
    """The stage that decided: `gold`, `extraction`, `guards`, `numbers` or `worker`."""
    reason: str
    """The reason in words."""


class MathVerifier(Reward):
    r"""1 if the final answer of the completion has the value of the gold answer, else 0.

    Use it for questions with a checkable answer: it needs no reward model and accepts every correct spelling.

    Args:
        timeout: CPU seconds per comparison. Everything except plain numbers is compared in a worker process.
        memory_limit_mb: Memory per worker in MiB, on top of its imports (about 20).
        num_workers: Number of worker processes.
        max_timeouts: Largest fraction of the latest questions, at least 100, that may have a new timeout. Above it
            the run stops: a timeout is worth 0, so with many timeouts correct answers are worth 0 too.
        percent: Whether `25` and `0.25` are both equal to `25\%`: a question for a percentage may be answered in
            either way. If False, only `0.25` is, which has the same value.
        convert_units: Whether `1\text{ foot}` is `12\text{ inches}`, if there is a question and it names no unit. If
            False, another unit is always wrong.
        ordered_lists: Whether `2, 1` is wrong where the gold answer is `1, 2`. Sets in braces never have an order.
        finished: Whether an answer must be in finished form: not `\sqrt{50}+\sqrt{18}` for `8\sqrt2`, and no copy of
            the question. If the gold answer is a number, the answer must be one in any case.
    """

    finds_answers = True
    gives_verdicts = True
    needs_answers = True
    scores_early = True

    def __init__(
        self,
        timeout: float = 1.0,
        memory_limit_mb: int = 512,
        num_workers: int = 2,
        max_timeouts: float = 0.05,
        percent: bool = True,
        convert_units: bool = True,
        ordered_lists: bool = False,
        finished: bool = True,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        require(0 <= max_timeouts <= 1, f"max_timeouts={max_timeouts}: give a fraction from 0 to 1")
        self.max_timeouts = max_timeouts
        self.policy: dict[str, Any] = {
            "percent": percent,
            "convert_units": convert_units,
            "ordered_lists": ordered_lists,
            "finished": finished,
        }
        self._pool = WorkerPool.computing(num_workers, timeout, memory_limit_mb)
        self._cache: dict[Pair, str] = {}
        """The outcomes of pairs, in the order of their last use."""
        self._good_golds: dict[str, bool] = {}
        """Whether each gold answer can be read."""
        self._slow_golds: set[str] = set()
        """Gold answers with a new timeout since the last check."""
        self._graded_golds: set[str] = set()
        """Gold answers of all samples since the last check."""
        self._counted: list[tuple[int, int]] = []
        """The numbers of slow and of graded gold answers, per check."""

    def read_questions(self, questions: Sequence[Question]) -> None:
        """Starts a worker, compares every gold answer with itself, and warns of each that cannot be read.

        Raises:
            LoadError: A worker cannot start.
            UsageError: A question has no gold answer.
        """
        super().read_questions(questions)
        self._pool.load(_COMPARE)
        self._check_golds([question.answer for question in questions])
        unreadable = [question for question in questions if not self._good_golds[question.answer]]
        for question in unreadable[:20]:
            log.warning(
                "reward %s cannot read the gold answer %.200r of %s: its samples get no reward (status %s)",
                self.name, question.answer, question.source or "a question without source", GOLD_BAD,
            )  # fmt: skip
        if len(unreadable) > 20:
            log.warning("reward %s: %d gold answers more could not be read", self.name, len(unreadable) - 20)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Grades `samples`.

        The status is `ok` if the answer was compared. These statuses are worth 0: `no_answer`, `unparseable` (the
        grammar does not know it), `restated` (equal, but copied from the question), `too_long`, and `timeout`, `memory`
        and `crash` (of the worker). Only `gold_bad` and `no_gold` give NaN.
        """
        return self.report(samples, *self.grade(samples))

    def report(
        self, samples: Sequence[Sample], answers: Sequence[str | None], verdicts: Sequence[Verdict]
    ) -> RewardResult:
        """Returns the result of `grade` as values, statuses and names of the answers."""
        names: list[str | None] = []
        result = RewardResult([], [], names)
        for sample, answer, verdict in zip(samples, answers, verdicts, strict=True):
            outcome = verdict.outcome
            result.value.append(math.nan if outcome in (GOLD_BAD, Status.NO_GOLD) else float(outcome == EQUAL))
            result.status.append(Status.OK if outcome in (EQUAL, DIFFERENT) else outcome)
            # A correct answer gets the name of the gold answer, so that a vote counts all its spellings as one.
            names.append(canonical(sample.answer if outcome == EQUAL else answer) if answer else None)
        return result

    def grade(self, samples: Sequence[Sample]) -> tuple[list[str | None], list[Verdict]]:
        """Returns the answer of each completion, and its verdict."""
        self._check_golds([sample.answer for sample in samples])
        answers = [extract_answer(sample.whole_turn) for sample in samples]
        verdicts: list[Verdict | Pair] = []
        for sample, answer in zip(samples, answers, strict=True):
            if not self._good_golds[sample.answer]:
                verdicts.append(_GOLD_BAD if sample.answer.strip() else _NO_GOLD)
            elif not answer:
                verdicts.append(_NO_ANSWER)
            else:
                question = sample.prompt.question.text if self.policy["finished"] else ""
                verdicts.append(decide(sample.answer, answer, question))
        by_worker = {
            pair: Verdict(outcome, "worker", f"{_OUTCOMES.get(outcome, outcome)}: `{pair[1]}` with `{pair[0]}`")
            for pair, outcome in self._compare([pair for pair in verdicts if isinstance(pair, tuple)]).items()
        }
        self._graded_golds.update(sample.answer for sample in samples)
        return answers, [by_worker[verdict] if isinstance(verdict, tuple) else verdict for verdict in verdicts]

    def explain(self, gold: str, answer: str, question: str = "") -> dict[str, str]:
        """Returns the claims that a worker reads of both, and the first difference; empty if it takes too long."""
        (outcome,) = self._pool.map(_EXPLAIN, [[gold, answer, question, self.policy]])
        return outcome.value if outcome.status == Status.OK else {}

    def stop_if_broken(self, statuses: Counter[str]) -> None:
        """Counts the questions with a new timeout on all ranks; a question with several counts once.

        Raises:
            RewardFailure: More than `max_timeouts` of the latest questions had one.
        """
        from grpo_lightning import ranks  # imports torch, which the workers do not need

        golds_by_rank = zip(*ranks.gather((self._slow_golds, self._graded_golds)), strict=True)
        slow, count = (len(set[str]().union(*golds)) for golds in golds_by_rank)
        self._counted.append((slow, count))
        self._slow_golds = set()
        self._graded_golds = set()

        # The latest checks that have enough questions together.
        while sum(count for _, count in self._counted[1:]) >= _MIN_COUNTED:
            del self._counted[0]
        slow, count = (sum(column) for column in zip(*self._counted, strict=True))
        if count >= _MIN_COUNTED and slow > self.max_timeouts * count:
            raise RewardFailure(
                f"reward {self.name}: comparing an answer timed out for {slow} of the latest {count} questions, more "
                f"than max_timeouts={self.max_timeouts}, and each such answer got 0. Either the reward needs a larger "
                f"`timeout`, now {self._pool.cpu_seconds:g} s, or the policy learned to write what is slow to compare "
                "(look at its completions)"
            )

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def _check_golds(self, golds: Sequence[str]) -> None:
        """Compares every new gold answer with itself."""
        unseen = [gold for gold in dict.fromkeys(golds) if gold not in self._good_golds]
        pairs = {gold: (gold, gold, "") for gold in unseen if gold.strip() and len(gold) <= MAX_CHARS}
        compared = self._compare([pair for gold, pair in pairs.items() if plain_number(gold.strip()) is None])
        for gold in unseen:
            self._good_golds[gold] = gold in pairs and compared.get(pairs[gold], EQUAL) == EQUAL

    def _compare(self, pairs: Sequence[Pair]) -> dict[Pair, str]:
        """Returns the outcome of each distinct pair, from the cache or from a worker."""
        # What is used goes to the end of the cache.
        cache = self._cache
        outcomes = {pair: cache.pop(pair) for pair in dict.fromkeys(pairs) if pair in cache}
        cache.update(outcomes)
        unknown = [pair for pair in dict.fromkeys(pairs) if pair not in outcomes]
        tasks = [[*pair, self.policy] for pair in unknown]
        for pair, outcome in zip(unknown, self._pool.map(_COMPARE, tasks), strict=True):
            verdicts: dict[str, str] = {Status.OK: outcome.value, Status.ERROR: UNPARSEABLE}
            outcomes[pair] = verdicts.get(outcome.status, outcome.status)
            if outcome.status == Status.TIMEOUT:
                self._slow_golds.add(pair[0])
            if outcome.status in (Status.OK, Status.ERROR, Status.TIMEOUT):  # the others depend on the machine's load
                cache[pair] = outcomes[pair]
        while len(cache) > _CACHE_SIZE:
            del cache[next(iter(cache))]
        return outcomes


_NO_ANSWER = Verdict(Status.NO_ANSWER, "extraction", r"no \boxed{}, <answer>, #### or 'answer is' after the reasoning")
_GOLD_BAD = Verdict(GOLD_BAD, "gold", "the gold answer cannot be read: it is too long or no mathematics")
_NO_GOLD = Verdict(Status.NO_GOLD, "gold", "there is no gold answer")
_TOO_LONG = Verdict(Status.TOO_LONG, "guards", f"longer than {MAX_CHARS} characters")
_SAME_NUMBER = Verdict(EQUAL, "numbers", "the same number")
_OTHER_NUMBER = Verdict(DIFFERENT, "numbers", "another number")
_OUTCOMES = {
    UNPARSEABLE: "not one answer that can be read",
    RESTATED: "equal, but copied from the question, or not in the form that it asks for",
    Status.TIMEOUT: "comparing them took too long",
    Status.MEMORY: "comparing them took too much memory",
    Status.CRASH: "comparing them ended two workers",
}


def decide(gold: str, answer: str, question: str = "") -> Verdict | Pair:
    """Returns the verdict if both are plain numbers, else the pair for a worker to compare."""
    if len(answer) > MAX_CHARS:
        return _TOO_LONG
    if "$" in answer and question:  # it may ask for cents
        return gold, answer, question
    gold_number = plain_number(gold.strip())
    answer_number = plain_number(answer)
    if gold_number is not None and gold_number == answer_number:
        return _SAME_NUMBER
    are_whole = all(number is not None and number.denominator == 1 for number in (gold_number, answer_number))
    return _OTHER_NUMBER if are_whole else (gold, answer, question)
