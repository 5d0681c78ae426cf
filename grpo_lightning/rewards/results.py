"""The scores of samples: one reward's result, and the scores of all rewards of the list."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from grpo_lightning.types import Status


@dataclass(slots=True, frozen=True)
class Segment:
    """The reward of one segment of a completion."""

    end: int
    """Index of the segment's last token in the completion, from 0."""
    value: float


@dataclass(slots=True)
class RewardResult:
    """One reward's scores of B samples."""

    value: list[float]
    """[B] the reward; NaN where the reward failed, which leaves the sample out of its group."""
    status: list[str] = field(default_factory=list)
    """[B] what happened: a `Status`, or one word of your own; by default `ok`. The rate of each is a metric."""
    answer: list[str | None] | None = None
    """[B] the answer found in each completion. Majority votes count equal strings as equal answers."""
    segments: list[list[Segment]] | None = None
    """[B] the scores of each completion's segments, for `ProcessSupervision`; `value` is that of the whole."""

    def __post_init__(self) -> None:
        """Fills in the default."""
        self.status = self.status or [Status.OK] * len(self.value)

    @classmethod
    def concat(cls, parts: Sequence["RewardResult"]) -> "RewardResult":
        """The scores of several batches of samples, in order."""
        answers = [part.answer or [None] * len(part.value) for part in parts]
        segments = [part.segments or [[] for _ in part.value] for part in parts]
        return cls(
            value=list(chain.from_iterable(part.value for part in parts)),
            status=list(chain.from_iterable(part.status for part in parts)),
            answer=list(chain.from_iterable(answers)) if any(part.answer for part in parts) else None,
            segments=list(chain.from_iterable(segments)) if any(part.segments for part in parts) else None,
        )

    def rows(self, rows: Sequence[int]) -> "RewardResult":
        """The scores of some samples, in that order."""
        return RewardResult(
            value=[self.value[row] for row in rows],
            status=[self.status[row] for row in rows],
            answer=self.answer and [self.answer[row] for row in rows],
            segments=self.segments and [self.segments[row] for row in rows],
        )


@dataclass(slots=True)
class Scores:
    """The scores of B samples by every reward of the list."""

    total: list[float]
    """[B] the weighted sum; NaN where a reward with a weight other than 0 failed."""
    results: dict[str, RewardResult]
    """The result of each reward by its name, in the order of the list."""
    learned_from: list[str] = field(default_factory=list)
    """The names of the rewards whose weight is not 0."""
    correct: str | None = None
    """The name of the reward that decides what is right; None is the first."""

    @property
    def main(self) -> RewardResult:
        """The result of the reward that decides what is right."""
        return self.results[self.correct or next(iter(self.results))]

    @classmethod
    def concat(cls, parts: Sequence["Scores"]) -> "Scores":
        """The scores of several batches of samples by the same rewards, in order."""
        return cls(
            total=list(chain.from_iterable(part.total for part in parts)),
            results={name: RewardResult.concat([part.results[name] for part in parts]) for name in parts[0].results},
            learned_from=parts[0].learned_from,
            correct=parts[0].correct,
        )

    def describe(self, row: int) -> dict[str, tuple[float, str]]:
        """Value and status of one sample by the name of each reward."""
        return {name: (result.value[row], result.status[row]) for name, result in self.results.items()}
