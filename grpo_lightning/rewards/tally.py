"""What became of a reward's samples: counts that add up over ranks, and one failure of each kind in words."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from grpo_lightning.types import Sample


@dataclass(slots=True)
class Tally:
    """The samples that a reward has scored since the last report."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Samples with each status."""
    failed: Counter[str] = field(default_factory=Counter)
    """Those of them that got no score (NaN)."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first failure of each status, in words."""

    @property
    def num_samples(self) -> int:
        return self.statuses.total()

    @property
    def num_failed(self) -> int:
        return self.failed.total()

    def add(self, samples: Sequence[Sample], values: Iterable[float], statuses: Iterable[str]) -> None:
        """Counts `samples`, which got these values and statuses."""
        for sample, value, status in zip(samples, values, statuses, strict=True):
            self.statuses[status] += 1
            if math.isnan(value):
                self.failed[status] += 1
                self.explain(sample, status)

    def explain(self, sample: Sample, status: str, why: str = "") -> None:
        """Remembers why `sample` failed, unless a failure with this status is known."""
        if status not in self.examples:
            source = sample.prompt.question.source or "the task"
            self.examples[status] = f"a sample of {source}, {sample.text[:80]!r}" + (f": {why}" if why else "")

    def copy(self) -> "Tally":
        """The same, to change."""
        return Tally(self.statuses.copy(), self.failed.copy(), self.examples.copy())

    @classmethod
    def total(cls, parts: Iterable["Tally"]) -> "Tally":
        """Those of several ranks together."""
        total = cls()
        for part in parts:
            total.statuses += part.statuses
            total.failed += part.failed
            total.examples = part.examples | total.examples
        return total

    def describe(self) -> str:
        """`failed on 3 of 32 samples (error: 2, timeout: 1), for example on ...`."""
        kinds = self.failed.most_common()
        counts = ", ".join(f"{status}: {count}" for status, count in kinds)
        return (
            f"failed on {self.num_failed} of {self.num_samples} samples ({counts}), "
            f"for example on {self.examples[kinds[0][0]]}"
        )
