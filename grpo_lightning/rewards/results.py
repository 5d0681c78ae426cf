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

    end: int  # index of the segment's last token in the completion, from 0
    value: float


@dataclass(slots=True)
class RewardResult:
    """One reward's scores of B samples."""

    value: list[float]  # [B] the reward; NaN where the reward failed, which leaves the sample out of its group
    status: list[str] = field(default_factory=list)
    """[B] what happened: a `Status`, or one word of your own; by default `ok`. The rate of each is a metric."""
    answer: list[str | None] | None = None
    """[B] the answer found in each completion. Majority votes count equal strings as equal answers."""
    segments: list[list[Segment]] | None = None
    """[B] the scores of each completion's segments, for `ProcessSupervision`; `value` is that of the whole."""
    note: list[str] | None = None
    """[B] why each completion has its value, for people: what a judge wrote, which tests failed."""

    def __post_init__(self) -> None:
        self.status = self.status or [Status.OK] * len(self.value)

    @classmethod
    def concat(cls, parts: Sequence["RewardResult"]) -> "RewardResult":
        """The scores of several batches of samples, in order."""

        def joined(name: str, missing: Any = None) -> Any:
            if not any(getattr(part, name) for part in parts):
                return None
            return [cell for part in parts for cell in getattr(part, name) or [missing] * len(part.value)]

        value, status = joined("value") or [], joined("status") or []
        return cls(value, status, joined("answer"), joined("segments", []), joined("note", ""))

    def segments_of(self, rows: Sequence[int]) -> SegmentRewards | None:
        """The segments of the completions `rows`; `SegmentRewards.row` is an index into `rows`."""
        if self.segments is None:
            return None
        own = [(index, segment) for index, row in enumerate(rows) for segment in self.segments[row]]
        return SegmentRewards(
            row=torch.tensor([index for index, _ in own], dtype=torch.int64),
            end=torch.tensor([segment.end for _, segment in own], dtype=torch.int64),
            value=torch.tensor([segment.value for _, segment in own], dtype=torch.float64),
        )

    def rows(self, rows: Sequence[int]) -> "RewardResult":
        """The scores of some samples, in that order."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        return RewardResult(**{name: column and [column[row] for row in rows] for name, column in columns.items()})


@dataclass(slots=True)
class Scores:
    """The scores of B samples by every reward of the list."""

    total: list[float]  # [B] the weighted sum; NaN where a reward with a weight other than 0 failed
    results: dict[str, RewardResult]  # the result of each reward by its name, in the order of the list
    weight: Mapping[str, float] = field(default_factory=dict)
    """The weights of the rewards that are learned from, by their names: of those that are not 0."""
    correct: str | None = None  # the name of the reward that decides what is right; None is the first

    @property
    def main(self) -> RewardResult:
        """The result of the reward that decides what is right."""
        return self.results[self.correct or next(iter(self.results))]

    @property
    def are_verdicts(self) -> bool:
        """True if that reward says 0 or 1 of every sample that it could score."""
        return all(value in (0, 1) or math.isnan(value) for value in self.main.value)

    def is_right(self, row: int) -> bool | None:
        """Whether one sample is right; None where that reward failed."""
        value = self.main.value[row]
        return None if math.isnan(value) else value > RIGHT_ABOVE

    @classmethod
    def concat(cls, parts: Sequence["Scores"]) -> "Scores":
        """The scores of several batches of samples by the same rewards, in order."""
        return cls(
            total=[total for part in parts for total in part.total],
            results={name: RewardResult.concat([part.results[name] for part in parts]) for name in parts[0].results},
            weight=parts[0].weight,
            correct=parts[0].correct,
        )

    def values(self, name: str | None) -> Tensor:
        """[B] float64 values of the reward `name`, or the `total`; None is the first with a weight. NaN: it failed."""
        name = next(iter(self.weight), TOTAL) if name is None else name
        total = torch.tensor(self.total, dtype=torch.float64)
        if name == TOTAL:
            return total
        return torch.tensor(self.results[name].value, dtype=torch.float64).masked_fill(total.isnan(), torch.nan)

    def table(self, rows: Sequence[int], group: Tensor, lengths: Tensor) -> RewardBatch:
        """The rewards with a weight of the B completions whose indices among all samples are `rows`."""
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
        """Value and status of one sample by the name of each reward."""
        return {name: (result.value[row], result.status[row]) for name, result in self.results.items()}

    def notes(self, row: int) -> dict[str, str]:
        """Why one sample has its values, by the names of the rewards that say so."""
        return {name: result.note[row] for name, result in self.results.items() if result.note and result.note[row]}


@dataclass(slots=True)
class Tally:
    """The samples that a reward has scored since the last report, counted by status. Tallies of ranks add up."""

    statuses: Counter[str] = field(default_factory=Counter)  # the number of samples with each status
    failed: Counter[str] = field(default_factory=Counter)  # the number of samples without a score (NaN), by status
    examples: dict[str, str] = field(default_factory=dict)  # the first failure of each status, in words

    @property
    def num_samples(self) -> int:
        """The number of samples scored."""
        return self.statuses.total()

    def add(self, samples: Sequence[Sample], values: Iterable[float], statuses: Iterable[str]) -> None:
        """Counts `samples` with their values and statuses."""
        for sample, value, status in zip(samples, values, statuses, strict=True):
            self.statuses[status] += 1
            if math.isnan(value):
                self.failed[status] += 1
                self.explain(sample, status)

    def explain(self, sample: Sample, status: str, why: str = "") -> None:
        """Keeps why `sample` failed as the example of `status`, unless there is one already."""
        if status not in self.examples:
            source = sample.prompt.question.source or "the task"
            self.examples[status] = f"a sample of {source}, {sample.text[:80]!r}" + (f": {why}" if why else "")

    @classmethod
    def total(cls, parts: Iterable["Tally"]) -> "Tally":
        """The sum of several tallies."""
        total = cls()
        for part in parts:
            total.statuses += part.statuses
            total.failed += part.failed
            total.examples = part.examples | total.examples
        return total

    def describe(self) -> str:
        """The failures in words: `failed on 3 of 32 samples (error: 2, timeout: 1), for example on ...`."""
        kinds, some = self.failed.most_common(), f"{self.failed.total()} of {self.num_samples} samples"
        if [*self.failed] == [Status.NO_GOLD]:
            return f"did not score {some}: they have no gold answer"
        counts = ", ".join(f"{status}: {count}" for status, count in kinds)
        return f"failed on {some} ({counts}), for example on {self.examples[kinds[0][0]]}"
