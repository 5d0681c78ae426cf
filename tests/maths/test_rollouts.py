import random

import pytest
import torch
from helpers.tiny import rollouts_of, rows_of

from grpo_lightning.maths.rollouts import FIELDS, Rollouts
from grpo_lightning.types import UsageError

OPTIONAL = ("old_logp", "ref_logp", "sampler_logp")


def random_rollouts(seed: int, given: float = 0.0) -> Rollouts:
    """Up to 14 completions of up to 5 prompts; about as many given tokens per drawn one as `given`."""
    rng = random.Random(seed)
    prompt_lengths = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 6))]
    lengths = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 15))]
    group = [rng.randrange(len(prompt_lengths)) for _ in lengths]
    return rollouts_of(lengths, prompt_lengths, group, seed, given=given)


def test_from_lists_lays_prompts_and_completions_end_to_end():
    rollouts = Rollouts.from_lists(prompts=[[1, 2], [3]], group=[1, 0, 1], completions=[[7], [8, 9], [6, 5, 4]])
    assert rollouts.prompt_token_ids.tolist() == [1, 2, 3]
    assert rollouts.prompt_lengths.tolist() == [2, 1]
    assert rollouts.group.tolist() == [1, 0, 1]
    assert rollouts.token_ids.tolist() == [7, 8, 9, 6, 5, 4]
    assert rollouts.lengths.tolist() == [1, 2, 3]
    assert (len(rollouts), rollouts.num_tokens) == (3, 6)
    assert rollouts.sizes.sequence_lengths.tolist() == [2, 4, 4]
    assert rollouts.sample_index.tolist() == [0, 1, 2]
    assert rollouts.advantage.tolist() == rollouts.weight.tolist() == [0.0] * 6
    assert rollouts.truncated.tolist() == [False] * 3
    assert all(getattr(rollouts, name) is None for name in OPTIONAL)
    assert rollouts.columns.keys() == {"advantage", "weight"}


@pytest.mark.parametrize("given", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_select_keeps_the_order_of_rows_and_drops_unused_prompts(seed, given):
    rollouts = random_rollouts(seed, given)
    rng = random.Random(1000 + seed)
    rows = [rng.randrange(len(rollouts)) for _ in range(rng.randrange(1, 12))]
    chosen = rollouts.select(torch.tensor(rows))
    before = rows_of(rollouts)
    assert rows_of(chosen) == [before[row] for row in rows]
    assert len(chosen.prompt_lengths) == len({int(rollouts.group[row]) for row in rows})


@pytest.mark.parametrize("given", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_tokens", [0, 1, 25, 60])
def test_micro_batches_keep_every_row_within_the_budget(seed, max_tokens, given):
    rollouts = random_rollouts(seed, given)
    micro_batches = rollouts.micro_batches(max_tokens)
    after = [row for micro_batch in micro_batches for row in rows_of(micro_batch)]
    assert sorted(after, key=lambda row: row["row"]) == rows_of(rollouts)
    sizes = [(len(micro_batch), int(micro_batch.sizes.sequence_lengths.max())) for micro_batch in micro_batches]
    assert max_tokens or len(micro_batches) == 1
    assert all(rows == 1 or max_tokens == 0 or rows * longest <= max_tokens for rows, longest in sizes)
    assert [longest for _, longest in sizes] == sorted((longest for _, longest in sizes), reverse=True)


@pytest.mark.parametrize("by_group", [False, True])
def test_micro_batches_have_the_rows_of_sizes(by_group):
    rollouts = random_rollouts(3)
    rows = rollouts.sizes.micro_batches(30, by_group)
    assert [micro_batch.sample_index.tolist() for micro_batch in rollouts.micro_batches(30, by_group)] == [
        own.tolist() for own in rows
    ]


@pytest.mark.parametrize("given", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_concat_keeps_the_rows_of_its_batches(seed, given):
    parts = [random_rollouts(seed, given), random_rollouts(100 + seed, given), random_rollouts(200 + seed, given)]
    rows = rows_of(Rollouts.concat(parts))
    assert [row.pop("row") for row in rows] == list(range(len(rows)))
    expected = [row for part in parts for row in rows_of(part)]
    assert rows == [{name: value for name, value in row.items() if name != "row"} for row in expected]


@pytest.mark.parametrize("given", [0.0, 1.0])
@pytest.mark.parametrize("index", [0, 1])
def test_concat_with_an_empty_batch_changes_nothing(index, given):
    parts = [random_rollouts(0, given)]
    parts.insert(index, Rollouts.from_lists([], [], []))
    assert rows_of(Rollouts.concat(parts)) == rows_of(random_rollouts(0, given))


def test_concat_of_rollouts_with_and_without_context():
    plain = Rollouts.from_lists([[1]], [0, 0], [[7], [8, 9]])
    given = Rollouts.from_lists([[2]], [0], [[4, 5, 6]], is_sampled=[[True, False, True]])
    both = Rollouts.concat([plain, given, plain])
    assert both.token_ids.tolist() == [7, 8, 9, 4, 6, 7, 8, 9]
    assert both.lengths.tolist() == [1, 2, 2, 1, 2]
    assert both.context.ids.tolist() == [5]
    assert both.context.lengths.tolist() == [0, 0, 1, 0, 0]
    assert both.context.position.tolist() == [0, 0, 1, 0, 2, 0, 0, 1]
    assert Rollouts.concat([plain, plain]).context is None


def test_concat_counts_completions_without_rows():
    parts = [Rollouts.from_lists([[1]], [0, 0], [[7], [8]]), Rollouts.from_lists([[2]], [0], [[9]])]
    assert Rollouts.concat(parts).sample_index.tolist() == [0, 1, 2]
    assert Rollouts.concat([*parts, *parts], num_samples=[5, 1, 2, 1]).sample_index.tolist() == [0, 1, 5, 6, 7, 8]


def test_context_lies_beside_the_sampled_tokens():
    rollouts = Rollouts.from_lists(
        prompts=[[1, 2], [3]],
        group=[1, 0, 1],
        completions=[[10, 20, 11, 21, 22], [12], [23, 13, 14, 24]],
        is_sampled=[[True, False, True, False, False], [True], [False, True, True, False]],
    )
    assert rollouts.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert (rollouts.num_tokens, rollouts.lengths.tolist()) == (5, [2, 1, 2])
    assert rollouts.context.position.tolist() == [0, 2, 0, 1, 2]
    assert rollouts.context.ids.tolist() == [20, 21, 22, 23, 24]
    assert rollouts.context.lengths.tolist() == [3, 0, 2]
    assert rollouts.all_token_ids.tolist() == [1, 2, 3, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    sizes = rollouts.sizes
    assert sizes.completion_lengths.tolist() == [5, 1, 4]
    assert sizes.sequence_lengths.tolist() == [6, 3, 5]
    assert sizes.sampled.tolist() == [0, 2, 5, 7, 8]
    completions = torch.cat([rollouts.token_ids, rollouts.context.ids])[sizes.order]
    assert completions.tolist() == [10, 20, 11, 21, 22, 12, 23, 13, 14, 24]
    # What is known of tokens is known of drawn ones.
    assert rollouts.advantage.shape == rollouts.weight.shape == (5,)
    assert rollouts.per_token(torch.tensor([1, 2, 3])).tolist() == [1, 1, 2, 3, 3]


def test_micro_batches_count_context():
    lists = [[1]], [0, 0], [[7, 8, 9, 10], [11, 12, 13, 14]]
    given = Rollouts.from_lists(*lists, is_sampled=[[True, False, False, True], [True, False, False, False]])
    assert len(given.micro_batches(8)) == 2
    assert len(given.micro_batches(10)) == 1
    # The prompt once, then 4 tokens twice.
    assert len(given.micro_batches(8, by_group=True)) == 2
    assert len(given.micro_batches(9, by_group=True)) == 1


@pytest.mark.parametrize("drawn", [[[False, False]], [[True]], [[True, False, True]]])
def test_a_completion_needs_a_sampled_token_and_a_flag_per_token(drawn):
    with pytest.raises(AssertionError):
        Rollouts.from_lists([[1]], [0], [[7, 8]], is_sampled=drawn)


def test_to_moves_every_tensor_and_keeps_dtypes():
    rollouts = rollouts_of([2, 3], prompt_lengths=[2, 4], given=1.0)
    rollouts.temperature = 0.7
    moved = rollouts.to("meta")
    assert moved.sizes is rollouts.sizes  # On the host, wherever the rest is.
    assert moved.temperature == 0.7
    fields = {name: getattr(rollouts, name) for name in FIELDS}
    for name, value in (fields | rollouts.columns).items():
        there = moved.columns[name] if name in moved.columns else getattr(moved, name)
        assert (there.device.type, there.dtype, there.shape) == ("meta", value.dtype, value.shape)
        assert value.device.type == "cpu"
    assert moved.columns.keys() == rollouts.columns.keys()
    assert {one.device.type for one in moved.context} == {"meta"}
    rollouts.old_logp = None
    assert rollouts.to("meta").old_logp is None


def test_a_log_prob_of_the_wrong_length_or_type_is_an_error():
    rollouts = rollouts_of([2, 3])
    for name, values in (
        ("old_logp", torch.zeros(4)),
        ("old_logp", torch.zeros(5, dtype=torch.bfloat16)),
        ("ref_logp", torch.zeros(5, dtype=torch.float64)),
    ):
        with pytest.raises(UsageError, match=name):
            rollouts.with_columns({name: values})
    with pytest.raises(AssertionError):
        Rollouts.from_lists([[1]], [0], [[2, 3]], truncated=torch.zeros(5, dtype=torch.bool))
