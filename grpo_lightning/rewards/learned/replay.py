"""Replay: a sample of all that a reward model has learned from, so that it does not forget it."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from grpo_lightning.rewards.learned.labelled import LabelledGroup
from grpo_lightning.types import UsageError


class ReplayBuffer:
    """A bounded reservoir over all iterations, stratified by iteration and label.

    The unit is a prompt with its completions, because pairs are made within a prompt; its label is `right`, `wrong` or
    `both`. Every stratum holds a uniform sample of what was ever added to it. All strata have the same room, which
    shrinks as iterations are added; those that need less leave it to the others.

    Args:
        size: Prompts held at most.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"buffer_size={size} of LearnedReward: give 1 or more")
        self.size = size
        # In a random order that never changes, so that the first k of a stratum are a uniform sample of it.
        self.strata: dict[tuple[int, str], list[LabelledGroup]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.strata.values()))

    def __iter__(self) -> Iterator[LabelledGroup]:
        for stratum in self.strata.values():
            yield from stratum

    def add(self, iteration: int, groups: Sequence[LabelledGroup], rng: Random) -> None:
        """Adds all prompts of an iteration, later than those added before.

        Args:
            iteration: Its number.
            groups: Its prompts, all of them at once.
            rng: Decides which stay.
        """
        assert all(iteration > earlier for earlier, _ in self.strata), "an iteration is added once, in order"
        for group in rng.sample(groups, len(groups)):
            self.strata.setdefault((iteration, group.outcome), []).append(group)
        room = equal_room([len(stratum) for stratum in self.strata.values()], self.size)
        kept = zip(self.strata.items(), room, strict=True)
        self.strata = {key: stratum[:places] for (key, stratum), places in kept if places}

    def by_iteration(self) -> dict[int, list[LabelledGroup]]:
        """The prompts of each iteration."""
        found: dict[int, list[LabelledGroup]] = {}
        for (iteration, _), stratum in self.strata.items():
            found.setdefault(iteration, []).extend(stratum)
        return found

    def state_dict(self) -> list[Any]:
        """All it holds, for a checkpoint."""
        return [[*key, [group.as_row() for group in stratum]] for key, stratum in self.strata.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Takes what `state_dict` gave."""
        self.strata = {
            (iteration, outcome): [LabelledGroup.from_row(row) for row in rows] for iteration, outcome, rows in state
        }


def equal_room(lengths: Sequence[int], size: int) -> list[int]:
    """How many each stratum keeps of `lengths`: all the same, as long as it has them; `size` together at most.

    What cannot be divided goes to the last, the newest.
    """
    room = [0] * len(lengths)
    left = min(size, sum(lengths))
    while left:
        short = [place for place, length in enumerate(lengths) if room[place] < length]
        each = left // len(short)
        for place in short if each else short[-left:]:
            more = min(max(each, 1), lengths[place] - room[place])
            room[place] += more
            left -= more
    return room


def mixed(
    new: Sequence[LabelledGroup], history: Sequence[LabelledGroup], size: int, replay: float, rng: Random
) -> Iterator[tuple[list[LabelledGroup], int]]:
    """One epoch over `new` in batches of which a share is drawn from `history`.

    "a replay mechanism that incorporates 10% of historical data" (DeepSeekMath, arXiv 2402.03300, Sec. 4.1.4).

    Args:
        new: Every one of them comes once.
        history: Drawn from evenly, each at most once a batch.
        size: Prompts in a batch; the last may be smaller.
        replay: Share of history in every batch, rounded so that it is exact over the batches; 0 to below 1.
        rng: Decides order and draws.

    Yields:
        A batch, and how many of its prompts, the last ones, are from history.
    """
    order = rng.sample(new, len(new))
    done = number = 0
    while done < len(order):
        # Rounded down over all batches so far, but for floating point.
        before, after = (int(batches * size * replay + 1e-9) for batches in (number, number + 1))
        old = min(after - before, len(history))
        batch = order[done : done + size - old]
        if len(batch) < size - old:
            old = min(round(len(batch) * replay / (1 - replay)), old)
        yield batch + rng.sample(history, old), old
        done += len(batch)
        number += 1
