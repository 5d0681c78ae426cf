"""The Splitter family: where the segments of a completion end."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from grpo_lightning.rewards.format import check_pattern
from grpo_lightning.sandbox.pool import Outcome, WorkerPool, inside
from grpo_lightning.types import Status


class Splitter(ABC):
    """Cuts texts into segments."""

    @abstractmethod
    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        """For each text the character indices at which it may be cut; or the status of a failure (`timeout`, ...)."""

    def __call__(self, texts: Sequence[str]) -> list[Outcome]:
        """For each text the ends of its segments, ascending; the last is its length. No segment is all white space."""
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
        """The indices after every line break."""
        return [Outcome(Status.OK, [index + 1 for index, c in enumerate(text) if c == "\n"]) for text in texts]


class ByPattern(Splitter):
    r"""Ends a segment after every match of a regular expression, which runs in a worker process.

    Args:
        pattern: The text between two segments, which belongs to the earlier one: `\n\n`, `[.;]\s`, or `</step>` for
            policies that mark segments. An empty match, such as `(?=Segment \d)`, cuts there.
        timeout: Seconds per completion.

    Raises:
        UsageError: `pattern` is not a regular expression.
    """

    def __init__(self, pattern: str, timeout: float = 1.0) -> None:
        check_pattern(pattern)
        self.pattern = pattern
        self._pool = WorkerPool(num_workers=1, timeout=timeout)

    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        """The indices after every match."""
        return self._pool.map(inside("patterns.ends"), [[self.pattern, text] for text in texts])

    def close(self) -> None:
        """Ends the worker process."""
        self._pool.close()


def _segments(text: str, cuts: Sequence[int]) -> list[int]:
    """The cuts with text on both sides, and the end."""
    ends: list[int] = []
    start = 0
    for cut in [*sorted(set(cuts)), len(text)]:
        if text[start:cut].strip():
            ends.append(cut)
            start = cut
        elif ends:  # white space belongs to the segment before it
            ends[-1] = start = cut
    return ends or [len(text)]
