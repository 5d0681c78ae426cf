"""The reservoir and what is drawn from it."""

from collections import Counter
from random import Random

import pytest
from helpers.learning import group

from grpo_lightning.plugins.learned.labelled import LabelledGroup
from grpo_lightning.plugins.learned.replay import ReplayBuffer, equal_room, mixed


def groups(count: int, *labels: float, name: str = "q") -> list[LabelledGroup]:
    return [group(f"{name}{number}", *labels) for number in range(count)]


@pytest.mark.parametrize(
    ("lengths", "size", "room"),
    [
        ([5, 5], 20, [5, 5]),
        ([5, 5], 6, [3, 3]),
        ([10, 1, 10], 9, [4, 1, 4]),
        ([5, 1, 4], 7, [3, 1, 3]),
        ([10, 10], 7, [3, 4]),  # what cannot be divided goes to the newest
        ([4, 4, 4], 2, [0, 1, 1]),
        ([1, 100, 2], 50, [1, 47, 2]),
        ([], 3, []),
    ],
)
def test_room_is_shared_equally(lengths: list[int], size: int, room: list[int]):
    assert equal_room(lengths, size) == room


def test_strata_by_iteration_and_outcome_within_the_size():
    buffer = ReplayBuffer(12)
    rng = Random(0)
    buffer.add(0, groups(6, 1) + groups(6, 0, name="w"), rng)
    assert {key: len(stratum) for key, stratum in buffer.strata.items()} == {(0, "right"): 6, (0, "wrong"): 6}
    buffer.add(1, groups(20, 1, 0), rng)
    assert {key: len(stratum) for key, stratum in buffer.strata.items()} == {
        (0, "right"): 4, (0, "wrong"): 4, (1, "both"): 4,
    }  # fmt: skip
    assert len(buffer) == 12 == len([*buffer])
    assert {iteration: len(found) for iteration, found in buffer.by_iteration().items()} == {0: 8, 1: 4}
    for iteration in range(2, 40):
        buffer.add(iteration, groups(3, 1), rng)
        assert len(buffer) == 12


def test_every_prompt_of_a_stratum_stays_with_the_same_chance():
    """20 prompts, cut to 12 by a second stratum and to 8 by a third: each stays in 40 % of 2000 trials."""
    stays: Counter[str] = Counter()
    trials = 2000
    for seed in range(trials):
        buffer, rng = ReplayBuffer(24), Random(seed)
        for iteration in range(3):
            buffer.add(iteration, groups(20, 1), rng)
        stays.update(g.prompt for g in buffer.by_iteration()[0])
    assert sum(stays.values()) == 8 * trials
    # Standard deviation of one count: sqrt(2000 * 0.4 * 0.6) = 21.9.
    assert len(stays) == 20 and all(abs(count - 800) < 4 * 21.9 for count in stays.values())


def test_a_tenth_of_every_batch_is_history():
    new, history = groups(180, 1, name="new"), groups(50, 0, name="old")
    batches = [*mixed(new, history, 20, 0.1, Random(0))]
    assert [(len(batch), old) for batch, old in batches] == [(20, 2)] * 10
    assert sorted(g.prompt for batch, old in batches for g in batch[: 20 - old]) == sorted(g.prompt for g in new)
    for batch, old in batches:
        drawn = [g.prompt for g in batch[20 - old :]]
        assert all(prompt.startswith("old") for prompt in drawn) and len(set(drawn)) == 2


def test_a_share_that_is_no_whole_number_is_exact_over_the_batches():
    """0.1 of 16 is 1.6, and whole numbers below 1.6, 3.2, 4.8, 6.4, 8 are 1, 3, 4, 6, 8."""
    batches = [*mixed(groups(1000, 1), groups(50, 0), 16, 0.1, Random(0))]
    assert [old for _, old in batches[:10]] == [1, 2, 1, 2, 2] * 2
