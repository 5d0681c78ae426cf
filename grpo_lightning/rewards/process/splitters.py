"""Where the segments of a completion end: the Splitter family."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from grpo_lightning.rewards.format import check_pattern
from grpo_lightning.sandbox.pool import OK, Outcome, WorkerPool, inside
from grpo_lightning.types import UsageError


class Splitter(ABC):
    """Cuts texts into segments."""

    @abstractmethod
    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        """For each text the places, in characters, where it may be cut; or why there are none (`timeout`, ...)."""

    def __call__(self, texts: Sequence[str]) -> list[Outcome]:
        """For each text the ends of its segments, ascending; the last is its length. None is all white space."""
        outcomes = self.cut(texts)
        return [
            Outcome(OK, _segments(text, outcome.value)) if outcome.status == OK else outcome
            for text, outcome in zip(texts, outcomes, strict=True)
        ]

    def close(self) -> None:
        """Releases worker processes. May be called twice."""


class ByLine(Splitter):
    """Every line that is not blank is a segment, with its line break."""

    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        return [Outcome(OK, [place + 1 for place, c in enumerate(text) if c == "\n"]) for text in texts]


class ByTag(Splitter):
    """A segment ends with a closing tag. What stands between two blocks belongs to the later one.

    Args:
        tags: Names of the tags: `step` for `<step>...</step>`.

    Raises:
        UsageError: There are none.
    """

    def __init__(self, tags: Sequence[str] = ("step",)) -> None:
        if not tags or not all(tags) or isinstance(tags, str):
            raise UsageError(f"tags={tags!r} of ByTag: give a list of names, such as [step, think]")
        self._closing = re.compile("|".join(re.escape(f"</{tag}>") for tag in tags))

    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        return [Outcome(OK, [match.end() for match in self._closing.finditer(text)]) for text in texts]


class ByPattern(Splitter):
    r"""A segment ends behind every match of a regular expression, which runs in a worker process.

    Args:
        pattern: What stands between segments and belongs to the earlier one: `\n\n`, `[.;]\s`. One that matches nothing
            but a place, `(?=Segment \d)`, cuts there.
        timeout: Seconds it may take on one completion.

    Raises:
        UsageError: `pattern` is not a regular expression.
    """

    def __init__(self, pattern: str, timeout: float = 1.0) -> None:
        check_pattern(pattern)
        self.pattern = pattern
        self._pool = WorkerPool(num_workers=1, timeout=timeout)

    def cut(self, texts: Sequence[str]) -> list[Outcome]:
        return self._pool.map(inside("separators.ends"), [[self.pattern, text] for text in texts])

    def close(self) -> None:
        """Ends the worker process."""
        self._pool.close()


def _segments(text: str, cuts: Sequence[int]) -> list[int]:
    """The cuts that leave something on both sides, and the end."""
    ends: list[int] = []
    start = 0
    for cut in [*sorted(set(cuts)), len(text)]:
        if text[start:cut].strip():
            ends.append(cut)
            start = cut
        elif ends:  # a blank belongs to the segment before
            ends[-1] = start = cut
    return ends or [len(text)]
