"""The data a reward model learns from: completions of one prompt, labelled by a verifier or a person."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from grpo_lightning.maths.metrics import RIGHT_ABOVE
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
        """Whether labels differ, so that there are pairs of a better and a worse completion."""
        return max(self.labels) > min(self.labels)

    @property
    def outcome(self) -> str:
        """`both` where labels differ, else `right` or `wrong`."""
        return "both" if self.contested else "right" if self.labels[0] > RIGHT_ABOVE else "wrong"

    def balanced(self, per_label: int) -> "LabelledGroup":
        """A group of the first `per_label` right completions and the first `per_label` wrong ones, in order."""
        chosen: list[int] = []
        room = {True: per_label, False: per_label}
        for row, label in enumerate(self.labels):
            if room[label > RIGHT_ABOVE]:
                room[label > RIGHT_ABOVE] -= 1
                chosen.append(row)
        return LabelledGroup(
            self.prompt,
            [self.completions[row] for row in chosen],
            [self.ended[row] for row in chosen],
            [self.labels[row] for row in chosen],
        )

    def as_row(self) -> dict[str, Any]:
        """The group as a dict, for a line of JSON or a checkpoint."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "LabelledGroup":
        """The group of a row of `as_row`, or of a preference with `prompt`, `chosen` and `rejected`."""
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


def hash_fraction(prompt: str) -> float:
    """A number from 0 to 1 that depends on the prompt alone: a hash, the same in every process and run."""
    return int.from_bytes(blake2b(prompt.encode(), digest_size=6).digest(), "big") / 2**48


def read_labelled(path: Path, skip: int = 0) -> list[LabelledGroup]:
    """The rows of a JSON lines file, without the first `skip`.

    A row has `prompt`, `chosen` and `rejected`, or `prompt`, `completions` and `labels` (0 to 1). A last line without a
    line break that is no JSON is still being written: it is left for later.

    Raises:
        UsageError: There is no such file, or a row has another form; the message names file and line.
    """
    if not path.is_file():
        raise UsageError(f"pairs={path} of LearnedReward: there is no such file; give JSON lines")
    found = []
    # Not splitlines, which also splits at characters that a text may have inside.
    *lines, rest = path.read_bytes().split(b"\n")
    for line_number, line in enumerate([*lines, rest] if is_json(rest) else lines, start=1):
        if line_number > skip:
            try:
                found.append(LabelledGroup.from_row(json.loads(line)))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UsageError(
                    f"{path}:{line_number}: {type(error).__name__}: {error}. A row needs prompt, chosen and rejected, "
                    "or prompt, completions and labels from 0 to 1"
                ) from error
    return found


def is_json(text: bytes) -> bool:
    """Whether the text is JSON, and whole."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def write_labelled(path: Path, groups: Sequence[LabelledGroup]) -> None:
    """Writes the file that `read_labelled` reads."""
    path.write_text("".join(json.dumps(group.as_row()) + "\n" for group in groups), encoding="utf-8")
