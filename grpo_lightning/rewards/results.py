"""The scores of samples: one reward's result, the scores of all rewards of the list, and counts of failures."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.maths.reward_batch import RewardBatch, SegmentRewards
from grpo_lightning.types import TOTAL, Sample, Status


@dataclass(slots=True, frozen=True)
class Segment:
    """The reward of one segment of a completion."""

    end: int
    """Index of the segment's last token in the completion, from 0."""
    value: float
    """The segment's reward."""


@dataclass(slots=True)
class RewardResult:
    """One reward's scores of B samples."""

    value: list[float]
    """[B] the reward; NaN where the reward failed, which leaves the sample out of its group."""
    status: list[str] = field(default_factory=list)
    """[B] what happened: a `Status`, or a word that you choose; by default `ok`. The rate of each is a metric."""
    answer: list[str | None] | None = None
    """[B] the answer found in each completion. Majority votes count equal strings as equal answers."""
    segments: list[list[Segment]] | None = None
    """[B] the scores of each completion's segments, for `ProcessSupervision`; `value` is the whole completion's."""
    note: list[str] | None = None
    """[B] why each completion has its value, for people: what a judge wrote, which tests failed."""

    def __post_init__(self) -> None:
        self.status = self.status or [Status.OK] * len(self.value)

    @classmethod
    def concat(cls, results: Sequence["RewardResult"]) -> "RewardResult":
        """Returns the scores of several batches of samples, in order."""

        def joined(name: str, default: Any = None) -> Any:
            if not any(getattr(result, name) for result in results):
                return None
            return [cell for result in results for cell in getattr(result, name) or [default] * len(result.value)]

        return cls(
            joined("value") or [],
            joined("status") or [],
            joined("answer"),
            joined("segments", []),
            joined("note", ""),
        )

    def segments_of(self, rows: Sequence[int]) -> SegmentRewards | None:
        """Returns the segments of the completions `rows`; `SegmentRewards.row` is an index into `rows`."""
        if self.segments is None:
            return None
        segments = [(index, segment) for index, row in enumerate(rows) for segment in self.segments[row]]
        return SegmentRewards(
            row=torch.tensor([index for index, _ in segments], dtype=torch.int64),
            end=torch.tensor([segment.end for _, segment in segments], dtype=torch.int64),
            value=torch.tensor([segment.value for _, segment in segments], dtype=torch.float64),
        )

    def rows(self, rows: Sequence[int]) -> "RewardResult":
        """Returns the scores of the samples `rows`, in that order."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return RewardResult(**{name: column and [column[row] for row in rows] for name, column in columns.items()})


@dataclass(slots=True)
class Scores:
    """The scores of B samples by every reward of the list."""

    total: list[float]
    """[B] the weighted sum; NaN where a reward with a weight other than 0 failed, or none applies."""
    results: dict[str, RewardResult]
    """The result of each reward by its name, in the order of the list."""
    weight: Mapping[str, float] = field(default_factory=dict)
    """The weights other than 0, by the names of their rewards: the policy learns from these."""
    correct: str | None = None
    """The name of the grader, the reward that decides what is right; None is the first."""

    @property
    def main(self) -> RewardResult:
        """The result of the grader."""
        return self.results[self.correct or next(iter(self.results))]

    @property
    def are_verdicts(self) -> bool:
        """True if the grader gives 0 or 1 to every sample that it could score."""
        return all(value in (0, 1) or math.isnan(value) for value in self.main.value)

    def is_right(self, row: int) -> bool | None:
        """Returns whether the sample `row` is right; None where the grader failed."""
        value = self.main.value[row]
        return None if math.isnan(value) else value > RIGHT_ABOVE

    @classmethod
    def concat(cls, batches: Sequence["Scores"]) -> "Scores":
        """Returns the scores of several batches of samples by the same rewards, in order."""
        return cls(
            total=[total for batch in batches for total in batch.total],
            results={
                name: RewardResult.concat([batch.results[name] for batch in batches]) for name in batches[0].results
            },
            weight=batches[0].weight,
            correct=batches[0].correct,
        )

    def values(self, name: str | None) -> Tensor:
        """[B] float64 values of the reward `name`, or the `total`; NaN where it failed.

        None is the first reward with a weight.
        """
        name = next(iter(self.weight), TOTAL) if name is None else name
        total = torch.tensor(self.total, dtype=torch.float64)
        if name == TOTAL:
            return total
        return torch.tensor(self.results[name].value, dtype=torch.float64).masked_fill(total.isnan(), torch.nan)

    def table(self, rows: Sequence[int], group: Tensor, lengths: Tensor) -> RewardBatch:
        """Returns the weighted rewards of the B completions whose indices among all samples are `rows`."""
        results = [self.results[name] for name in self.weight]
        value = torch.tensor([[result.value[row] for row in rows] for result in results], dtype=torch.float64)
        return RewardBatch(
            value=value.reshape(len(results), len(rows)),
            weight=torch.tensor([*self.weight.values()], dtype=torch.float64),
            group=group,
            lengths=lengths,
            segments=[result.segments_of(rows) for result in results],
            total=torch.tensor([self.total[row] for row in rows], dtype=torch.float64),
        )

    def describe(self, row: int) -> dict[str, tuple[float, str]]:
        """Returns value and status of the sample `row`, by the name of each reward."""
        return {name: (result.value[row], result.status[row]) for name, result in self.results.items()}

    def notes(self, row: int) -> dict[str, str]:
        """Returns why the sample `row` has its values, by the names of the rewards that say so."""
        return {name: result.note[row] for name, result in self.results.items() if result.note and result.note[row]}


@dataclass(slots=True)
class Tally:
    """The samples that a reward has scored since the last report, counted by status. Tallies of ranks add up."""

    statuses: Counter[str] = field(default_factory=Counter)
    """The number of samples with each status."""
    failed: Counter[str] = field(default_factory=Counter)
    """The number of samples without a score (NaN), by status."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first failure of each status, in words."""

    @property
    def num_samples(self) -> int:
        """The number of samples scored."""
        return self.statuses.total()

    def add(self, samples: Sequence[Sample], values: Iterable[float], statuses: Iterable[str]) -> None:
        """Counts `samples` with their values and statuses."""
        for sample, value, status in zip(samples, values, statuses, strict=True):
            self.statuses[status] += 1
            if math.isnan(value) and status != Status.NOT_APPLICABLE:
                self.failed[status] += 1
                self.explain(sample, status)

    def explain(self, sample: Sample, status: str, reason: str = "") -> None:
        """Keeps the reason why `sample` failed as the example of `status`, unless `status` has an example."""
        if status not in self.examples:
            source = sample.prompt.question.source or "the task"
            self.examples[status] = f"a sample of {source}, {sample.text[:80]!r}" + (f": {reason}" if reason else "")

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> "Tally":
        """Returns the sum of several tallies."""
        total = cls()
        for tally in tallies:
            total.statuses += tally.statuses
            total.failed += tally.failed
            total.examples = tally.examples | total.examples
        return total

    def describe(self) -> str:
        """Returns the failures in words: `failed on 3 of 32 samples (error: 2, timeout: 1), for example on ...`."""
        num_failed = f"{self.failed.total()} of {self.num_samples} samples"
        if [*self.failed] == [Status.NO_GOLD]:
            return f"did not score {num_failed}: they have no gold answer"
        kinds = self.failed.most_common()
        counts = ", ".join(f"{status}: {count}" for status, count in kinds)
        return f"failed on {num_failed} ({counts}), for example on {self.examples[kinds[0][0]]}"
