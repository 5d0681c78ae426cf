"""The data of a reward model: the reservoir, what is drawn from it, balance and files."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from helpers.learning import group

from grpo_lightning.plugins.rewards.learned.replay import (
    LabelledGroup,
    ReplayBuffer,
    equal_room,
    mixed,
    read_labelled,
)
from grpo_lightning.plugins.rewards.learned.reward_model_update import split
from grpo_lightning.types import UsageError


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
    sizes = lambda: {key: len(stratum) for key, stratum in buffer.strata.items()}  # noqa: E731
    assert sizes() == {(0, "right"): 6, (0, "wrong"): 6}
    buffer.add(1, groups(20, 1, 0), rng)
    assert sizes() == {(0, "right"): 4, (0, "wrong"): 4, (1, "both"): 4}
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


def test_a_product_just_below_a_whole_number_and_a_short_last_batch():
    assert 100 * 0.29 < 29
    batches = mixed(groups(142, 1), groups(50, 0), 100, 0.29, Random(0))
    assert [(len(batch), old) for batch, old in batches] == [(100, 29), (100, 29)]
    # Of the last batch, too, one half is history.
    batches = mixed(groups(5, 1), groups(50, 0), 4, 0.5, Random(0))
    assert [(len(batch), old) for batch, old in batches] == [(4, 2), (4, 2), (2, 1)]


# Labelled completions: balance, files


def test_at_most_so_many_of_each_label_stay():
    balanced = group("q", 1, 1, 0, 1, 0, 0, 1).balanced(2)
    assert balanced.completions == ["q0", "q1", "q2", "q4"]
    assert balanced.labels == [1, 1, 0, 0]
    assert group("q", 0, 0, 0, 1).balanced(2).labels == [0, 0, 1]


def test_rows_of_a_file(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "a", "chosen": "good", "rejected": "bad"}\n'
        '{"prompt": "b", "completions": ["x", "y", "z"], "labels": [1, 0, 0.5], "ended": [true, true, false]}\n'
    )
    first, second = read_labelled(path)
    assert first == LabelledGroup("a", ["good", "bad"], [True, True], [1.0, 0.0])
    assert second == LabelledGroup("b", ["x", "y", "z"], [True, True, False], [1.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"prompt": "a", "chosen": "good"}', "'completions'"),
        ('{"prompt": "a", "completions": ["x"], "labels": [2]}', "from 0 to 1"),
        ('{"prompt": "a", "completions": [], "labels": []}', "0 completions"),
        ('{"prompt": "a", "completions": ["x"], "labels": [1, 0]}', "2 labels"),
        ('{"prompt": 3, "chosen": "good", "rejected": "bad"}', "must be text"),
        ("[]", "AttributeError"),
        ("{", "not JSON"),
        ('{"prompt": "a", "chosen": "\\ud83d", "rejected": "bad"}', "surrogates not allowed"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, says: str):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "chosen": "good", "rejected": "bad"}\n' + row + "\n")
    with pytest.raises(UsageError, match=r"rows.jsonl:2") as caught:
        read_labelled(path)
    assert says in str(caught.value)


def test_a_line_ends_at_a_line_break_alone(tmp_path: Path):
    path, texts = tmp_path / "rows.jsonl", ["a\u2028b", "a\x85b", "c"]
    rows = [json.dumps({"prompt": "q", "chosen": text, "rejected": ""}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(rows), encoding="utf-8")
    assert [group.completions[0] for group in read_labelled(path)] == texts


def test_the_held_out_prompts_are_the_same_in_every_iteration():
    groups = [group(f"prompt {number}", 1, 0) for number in range(2000)]
    new, held_out = split(groups, 0.1)
    assert abs(len(held_out) - 200) < 40
    again = groups[1000:] + groups[:50]
    assert split(again, 0.1)[1] == [g for g in again if g in held_out]
    assert [g for g in groups if g not in held_out] == new
