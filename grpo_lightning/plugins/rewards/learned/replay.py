"""The data a reward model learns from, labelled by a verifier or a person, and a bounded sample of it: replay."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from random import Random
from typing import Any

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.tasks.readers import READERS
from grpo_lightning.types import UsageError, at_least, require


@dataclass(slots=True)
class LabelledGroup:
    """The labelled completions of one prompt, at least one."""

    prompt: str
    """The prompt as the reward model reads it."""
    completions: list[str]
    """The texts of the completions."""
    ended: list[bool]
    """Whether each completion ended by itself; False where it was cut off. Files have the name of this column."""
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
        """Returns a group of the first `per_label` right completions and the first `per_label` wrong ones, in order."""
        is_right = [label > RIGHT_ABOVE for label in self.labels]
        is_taken = [is_right[:row].count(verdict) < per_label for row, verdict in enumerate(is_right)]
        return LabelledGroup(
            self.prompt,
            completions=[*compress(self.completions, is_taken)],
            ended=[*compress(self.ended, is_taken)],
            labels=[*compress(self.labels, is_taken)],
        )

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "LabelledGroup":
        """Returns the group of a row of a file or checkpoint; a preference has `prompt`, `chosen` and `rejected`."""
        if {"chosen", "rejected"} <= row.keys():
            completions = [row["chosen"], row["rejected"]]
            labels = [1.0, 0.0]
        else:
            completions = list(row["completions"])
            labels = [float(label) for label in row["labels"]]
        have_ended = list(row.get("ended", [True] * len(completions)))
        if not len(completions) == len(labels) == len(have_ended) > 0:
            raise ValueError(f"{len(completions)} completions, {len(labels)} labels, {len(have_ended)} ended")
        if not all(isinstance(text, str) for text in [row["prompt"], *completions]):
            raise TypeError("prompt and completions must be text")
        "".join([row["prompt"], *completions]).encode()  # a UnicodeEncodeError is a ValueError
        if not all(0 <= label <= 1 for label in labels):
            raise ValueError(f"labels {labels}: give numbers from 0 to 1")
        return cls(row["prompt"], completions, have_ended, labels)


def read_labelled(path: Path) -> list[LabelledGroup]:
    """Reads a JSON lines file of `prompt`, `chosen` and `rejected`, or `prompt`, `completions` and `labels`."""
    groups = []
    for number, row in READERS[".jsonl"](path):
        try:
            groups.append(LabelledGroup.from_row(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{path}:{number}: {type(error).__name__}: {error}. A row needs prompt, chosen and rejected, "
                "or prompt, completions and labels from 0 to 1"
            ) from error
    return groups


Batch = tuple[list[LabelledGroup], int]
"""Prompts of one optimizer update, and how many of them, the last ones, are from earlier iterations."""


@dataclass
class Replay:
    """The memory of a reward model: which completions it learns from, is tested on, and learns from again.

    Args:
        fraction: Fraction of each batch that is sampled from earlier iterations, from 0 to below 1.
        buffer_size: Largest number of prompts remembered; a fraction `held_out` of them is for testing.
        per_label: Largest number of right completions, and of wrong ones, taken from one prompt.
        held_out: Fraction of the prompts that are never trained on; the prompt's text alone decides. An iteration waits
            for the next one if none of its prompts are held out, or all are.
        seed: Seed of the order and of the sampling.
    """

    fraction: float = 0.1
    """Fraction of each batch that is sampled from earlier iterations."""
    buffer_size: int = 4096
    """Largest number of prompts remembered."""
    per_label: int = 4
    """Largest number of right completions, and of wrong ones, of a prompt."""
    held_out: float = 0.1
    """Fraction of the prompts that are never trained on."""
    seed: int = 0
    """Seed of the order and of the sampling."""

    def __post_init__(self) -> None:
        at_least("replay.buffer_size", self.buffer_size, 2, "LearnedReward")
        at_least("replay.per_label", self.per_label, 1, "LearnedReward")
        require(
            0 <= self.fraction < 1,
            f"replay.fraction={self.fraction} of LearnedReward: give a fraction from 0 to below 1",
        )
        require(
            0 < self.held_out < 1,
            f"replay.held_out={self.held_out} of LearnedReward: give a fraction above 0 and below 1",
        )


class ReplayBuffer:
    """A bounded reservoir over all iterations, stratified by iteration and label.

    The unit is a prompt with its completions, because pairs are made within a prompt. Its label is `right`, `wrong` or
    `both`. Every stratum holds a uniform sample of what was ever added to it. All strata have equal room, which shrinks
    as iterations are added; room that a stratum does not need goes to the others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # In a random order that never changes, so that the first k of a stratum are a uniform sample of it.
        self.strata: dict[tuple[int, str], list[LabelledGroup]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.strata.values()))

    def __iter__(self) -> Iterator[LabelledGroup]:
        for stratum in self.strata.values():
            yield from stratum

    def add(self, iteration: int, groups: Sequence[LabelledGroup], rng: Random) -> None:
        """Adds all prompts of an iteration, which must be later than the iterations added before."""
        for group in rng.sample(groups, len(groups)):
            self.strata.setdefault((iteration, group.outcome), []).append(group)
        room = equal_room([len(stratum) for stratum in self.strata.values()], self.size)
        strata_and_sizes = zip(self.strata.items(), room, strict=True)
        self.strata = {key: stratum[:size] for (key, stratum), size in strata_and_sizes if size}

    def by_iteration(self) -> dict[int, list[LabelledGroup]]:
        """Returns the prompts of each iteration."""
        groups_by_iteration: dict[int, list[LabelledGroup]] = {}
        for (iteration, _), stratum in self.strata.items():
            groups_by_iteration.setdefault(iteration, []).extend(stratum)
        return groups_by_iteration

    def state_dict(self) -> list[Any]:
        """Returns the prompts of all strata, for a checkpoint."""
        return [[*key, [asdict(group) for group in stratum]] for key, stratum in self.strata.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restores the prompts that `state_dict` returned."""
        self.strata = {
            (iteration, outcome): [LabelledGroup.from_row(row) for row in rows] for iteration, outcome, rows in state
        }


def equal_room(lengths: Sequence[int], size: int) -> list[int]:
    """Divides room for `size` prompts equally among strata of these lengths; returns the room of each.

    A stratum gets no more than its length. A remainder goes to the last strata, the newest. In `equal_room([5, 1, 4],
    7)`, which is `[3, 1, 3]`, the first and the third share the room that the second does not need.
    """
    room = [0] * len(lengths)
    num_free = min(size, sum(lengths))
    while num_free:
        short = [index for index, length in enumerate(lengths) if room[index] < length]
        per_stratum = num_free // len(short)
        for index in short if per_stratum else short[-num_free:]:
            num_added = min(max(per_stratum, 1), lengths[index] - room[index])
            room[index] += num_added
            num_free -= num_added
    return room


def mixed(
    new: Sequence[LabelledGroup], history: Sequence[LabelledGroup], size: int, replay: float, rng: Random
) -> Iterator[Batch]:
    """Yields the batches of one pass over `new`.

    "a replay mechanism that incorporates 10% of historical data" (DeepSeekMath, arXiv 2402.03300, Sec. 4.1.4). The
    fraction is exact over the batches: 15 new prompts in batches of 4 with `replay=0.1` get 0, 0, 1 and 0 prompts of
    history, since the sum of 0.4 per batch, rounded down, is 0, 0, 1, 1. Prompts of history are sampled uniformly, each
    at most once per batch. The last batch may be smaller.
    """
    order = rng.sample(new, len(new))
    start = index = 0
    while start < len(order):
        # Rounded down over all batches so far; 1e-9 is for products such as 10 x 0.3, which may be just below 3.
        total_before, total_after = (int(batches * size * replay + 1e-9) for batches in (index, index + 1))
        num_old = min(total_after - total_before, len(history))
        batch = order[start : start + size - num_old]
        if len(batch) < size - num_old:
            num_old = min(round(len(batch) * replay / (1 - replay)), num_old)
        yield batch + rng.sample(history, num_old), num_old
        start += len(batch)
        index += 1
