"""Counts of a reward's samples by status, which add up over ranks, with one example of each kind of failure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from grpo_lightning.types import Sample, Status


@dataclass(slots=True)
class Tally:
    """The samples that a reward has scored since the last report."""

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

    @property
    def num_failed(self) -> int:
        """The number of samples without a score."""
        return self.failed.total()

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

    def copy(self) -> "Tally":
        """A copy that may be changed."""
        return Tally(self.statuses.copy(), self.failed.copy(), self.examples.copy())

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
        kinds = self.failed.most_common()
        if [*self.failed] == [Status.NO_GOLD]:
            return f"did not score {self.num_failed} of {self.num_samples} samples: they have no gold answer"
        counts = ", ".join(f"{status}: {count}" for status, count in kinds)
        return (
            f"failed on {self.num_failed} of {self.num_samples} samples ({counts}), "
            f"for example on {self.examples[kinds[0][0]]}"
        )
