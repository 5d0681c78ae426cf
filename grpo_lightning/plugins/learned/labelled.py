"""The data a reward model learns from: completions of one prompt, labelled by a verifier or a person."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.tasks.readers import READERS
from grpo_lightning.types import UsageError


@dataclass(slots=True)
class LabelledGroup:
    """The labelled completions of one prompt, at least one."""

    prompt: str
    """The prompt as the reward model reads it."""
    completions: list[str]
    ended: list[bool]
    """Whether each completion ended by itself; False where it was cut off."""
    labels: list[float]
    """How right each completion is, from 0 to 1."""

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def contested(self) -> bool:
        """True where labels differ, so that there are pairs of a better and a worse completion."""
        return max(self.labels) > min(self.labels)

    @property
    def outcome(self) -> str:
        """`both` where labels differ, else `right` or `wrong`."""
        return "both" if self.contested else "right" if self.labels[0] > RIGHT_ABOVE else "wrong"

    @property
    def hashed(self) -> float:
        """A number from 0 to 1 that depends on the prompt alone: a hash, the same in every process and run."""
        return int.from_bytes(blake2b(self.prompt.encode(), digest_size=6).digest(), "big") / 2**48

    def balanced(self, per_label: int) -> "LabelledGroup":
        """A group of the first `per_label` right completions and the first `per_label` wrong ones, in order."""
        right = [label > RIGHT_ABOVE for label in self.labels]
        kept = [right[:row].count(own) < per_label for row, own in enumerate(right)]
        completions, ended, labels = compress(self.completions, kept), compress(self.ended, kept), self.labels
        return LabelledGroup(self.prompt, [*completions], [*ended], [*compress(labels, kept)])

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "LabelledGroup":
        """The group of a row of a file or a checkpoint, or of a preference with `prompt`, `chosen` and `rejected`."""
        if {"chosen", "rejected"} <= row.keys():
            completions, labels = [row["chosen"], row["rejected"]], [1.0, 0.0]
        else:
            completions, labels = list(row["completions"]), [float(label) for label in row["labels"]]
        ended = list(row.get("ended", [True] * len(completions)))
        if not len(completions) == len(labels) == len(ended) > 0:
            raise ValueError(f"{len(completions)} completions, {len(labels)} labels, {len(ended)} ended")
        if not all(isinstance(text, str) for text in [row["prompt"], *completions]):
            raise TypeError("prompt and completions must be text")
        "".join([row["prompt"], *completions]).encode()  # a UnicodeEncodeError is a ValueError
        if not all(0 <= label <= 1 for label in labels):
            raise ValueError(f"labels {labels}: give numbers from 0 to 1")
        return cls(row["prompt"], completions, ended, labels)


def read_labelled(path: Path) -> list[LabelledGroup]:
    """The rows of a JSON lines file: `prompt`, `chosen` and `rejected`, or `prompt`, `completions` and `labels`."""
    found = []
    for number, row in READERS[".jsonl"](path):
        try:
            found.append(LabelledGroup.from_row(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{path}:{number}: {type(error).__name__}: {error}. A row needs prompt, chosen and rejected, "
                "or prompt, completions and labels from 0 to 1"
            ) from error
    return found


def write_labelled(path: Path, groups: Sequence[LabelledGroup]) -> None:
    """Writes the file that `read_labelled` reads."""
    path.write_text("".join(json.dumps(asdict(group)) + "\n" for group in groups), encoding="utf-8")
