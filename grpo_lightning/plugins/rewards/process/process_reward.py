"""A reward that scores every segment of a completion, and the Splitter family: where segments end."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

import numpy as np

from grpo_lightning.plugins.rewards.process.scorers import SegmentScorer
from grpo_lightning.rewards.format import check_pattern
from grpo_lightning.rewards.results import RewardResult, Segment
from grpo_lightning.rewards.reward import Reward, Run
from grpo_lightning.sandbox.pool import Outcome, WorkerPool, inside
from grpo_lightning.types import Completion, Question, Sample, Status, at_least, require


class Splitter(ABC):
    """Cuts texts into segments."""

    @abstractmethod
    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        """Returns the character indices at which each text may be cut; or the status of a failure (`timeout`, ...)."""

    def __call__(self, texts: Sequence[str]) -> list[Outcome]:
        """Returns the ends of each text's segments, ascending, up to its length. No segment is all white space."""
        outcomes = self.cut(texts)
        for text, outcome in zip(texts, outcomes, strict=True):
            if outcome.status == Status.OK:
                outcome.value = _segments(text, outcome.value)
        return outcomes

    def close(self) -> None:
        """Releases worker processes. May be called twice."""


class ByLine(Splitter):
    """Makes every line that is not blank a segment, with its line break: for solutions with one thought per line."""

    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        return [Outcome(Status.OK, [index + 1 for index, c in enumerate(text) if c == "\n"]) for text in texts]


class ByPattern(Splitter):
    r"""Ends a segment after every match of a regular expression, which runs in a worker process.

    Args:
        pattern: The text between two segments, which belongs to the earlier one: `\n\n`, `[.;]\s`, or `</step>` for
            policies that mark segments. An empty match, such as `(?=Segment \d)`, cuts there.
        timeout: CPU seconds per completion.
    """

    def __init__(self, pattern: str, timeout: float = 1.0) -> None:
        check_pattern(pattern)
        self.pattern = pattern
        self._pool = WorkerPool.computing(1, timeout)

    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        return self._pool.map(inside("patterns.ends"), [[self.pattern, text] for text in texts])

    def close(self) -> None:
        self._pool.close()


def _segments(text: str, cuts: Sequence[int]) -> list[int]:
    """Returns the cuts with text on both sides, and the end."""
    ends: list[int] = []
    start = 0
    for cut in [*sorted(set(cuts)), len(text)]:
        if text[start:cut].strip():
            ends.append(cut)
            start = cut
        elif ends:  # white space belongs to the segment before it
            ends[-1] = start = cut
    return ends or [len(text)]


Reduce = Literal["sum", "min", "last", "mean"]

REDUCE: dict[Reduce, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "last": itemgetter(-1),
    "mean": fmean,
}


class ProcessReward(Reward):
    """A score for every segment of a completion, at the segment's last token.

    `ProcessSupervision` learns from the segments, and so learns which segments were right. Other advantages learn from
    the value of the completion, to which `reduce` reduces the scores. The last segment ends at the last token, the stop
    token included. Segments that end within one token are one segment.

    Args:
        scorer: Scores the segments.
        splitter: Cuts completions into segments; `ByLine` if left out.
        reduce: The value of the completion: the `sum` of the scores, which pays for many segments, their `min`, the
            `last` one, or their `mean`.
        max_segments: Largest number of segments per completion; the last one takes all further text.
    """

    grades_cheaply = False

    def __init__(
        self,
        scorer: SegmentScorer,
        splitter: Splitter | None = None,
        reduce: Reduce = "min",
        max_segments: int = 64,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        at_least("max_segments", max_segments, 1, "ProcessReward")
        require(reduce in REDUCE, f"reduce={reduce!r} of ProcessReward: give one of {', '.join(REDUCE)}")
        self.scorer = scorer
        self.tokenizer: Any = None
        """The policy's tokenizer, which maps characters to tokens."""
        self.splitter = splitter or ByLine()
        self.reduce: Reduce = reduce
        self.max_segments = max_segments

    def read_questions(self, questions: Sequence[Question]) -> None:
        self.scorer.read_questions(questions)

    def setup(self, run: Run) -> None:
        self.tokenizer = run.tokenizer
        self.scorer.setup(run)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Scores the segments of the completions that the splitter could cut.

        The status is `ok`, or, with a value of NaN and no segments, `timeout`, `memory` or `crash` of the splitter.
        """
        cuts = self.splitter([sample.text for sample in samples])
        result = RewardResult([math.nan] * len(samples), [cut.status for cut in cuts], segments=[[] for _ in samples])
        assert result.segments is not None
        cut_rows = [row for row, cut in enumerate(cuts) if cut.status == Status.OK]
        ends_by_row = [self._ends(samples[row], cuts[row].value) for row in cut_rows]
        texts = [
            [samples[row].text[start:end] for start, end in pairwise([0, *ends])]
            for row, ends in zip(cut_rows, ends_by_row, strict=True)
        ]
        scores = self.scorer.score([samples[row] for row in cut_rows], texts)
        for row, ends, values in zip(cut_rows, ends_by_row, scores, strict=True):
            result.segments[row] = [*map(Segment, ends.values(), values)]
            result.value[row] = math.nan if any(map(math.isnan, values)) else REDUCE[self.reduce](values)
        return result

    def close(self) -> None:
        self.splitter.close()
        self.scorer.close()

    def _ends(self, sample: Sample, ends: Sequence[int]) -> dict[int, int]:
        """Returns the index of each segment's last token by the index of the character after the segment."""
        if len(ends) > self.max_segments:
            ends = [*ends[: self.max_segments - 1], ends[-1]]
        start, written = last_turn(sample)
        tokens = [start + token for token in last_tokens(self.tokenizer, written, sample.text, ends[:-1])]
        # Of segments that end within one token the last one stays.
        end_by_token = {token: end for end, token in zip(ends, [*tokens, len(sample.token_ids) - 1], strict=True)}
        return {end: token for token, end in end_by_token.items()}


def last_turn(sample: Sample) -> tuple[int, list[int]]:
    """Returns the index of the first sampled token of `sample.text`, and the token ids without the stop token."""
    ends = sample.conversation.ends if sample.conversation else []
    start = ends[-2] + 1 if len(ends) > 1 else 0
    return start, Completion(sample.token_ids[start:], None, sample.finish_reason, sample.stop_string).written


def last_tokens(tokenizer: Any, token_ids: Sequence[int], text: str, ends: Sequence[int]) -> list[int]:
    """Returns the index of the last token of the text up to each of `ends`: the first token that completes the text.

    Beginnings of the completion are decoded to find it. So it is right for characters of several tokens, tokens of
    several characters, and tokens that decode to nothing.

    Args:
        tokenizer: The policy's tokenizer.
        token_ids: The ids of the completion without the stop token.
        text: The text of the completion, up to the end of a stop string.
        ends: Ascending indices of characters.
    """
    ids = np.array(token_ids, dtype=np.int64)  # transformers checks every item of a list

    @cache
    def beginning(last: int) -> str:
        return str(tokenizer.decode(ids[: last + 1], skip_special_tokens=True))

    if ends and not (decoded := beginning(len(token_ids) - 1)).startswith(text):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} decodes the completion to {decoded[:80]!r}, "
            f"not to {text[:80]!r}: give the policy's own tokenizer"
        )

    # The end of a segment is never before the end of an earlier one.
    tokens = [0]
    for end in ends:
        token = bisect_left(range(len(ids)), True, tokens[-1], key=lambda last: beginning(last).startswith(text[:end]))
        tokens.append(token)
    return tokens[1:]
