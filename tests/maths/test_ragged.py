import itertools
import random

import pytest
import torch

from grpo_lightning.maths import ragged


def random_segments(seed: int) -> list[list[int]]:
    """Up to 8 segments of up to 6 numbers; some are empty."""
    rng = random.Random(seed)
    return [[rng.randrange(100) for _ in range(rng.randrange(7))] for _ in range(rng.randrange(1, 9))]


def flat(segments: list[list[int]]) -> torch.Tensor:
    return torch.tensor([value for segment in segments for value in segment], dtype=torch.int64)


def sizes(segments: list[list[int]]) -> torch.Tensor:
    return torch.tensor([len(segment) for segment in segments])


def test_starts_per_element_and_positions_by_hand():
    lengths = torch.tensor([3, 0, 1, 2])
    assert ragged.starts(lengths).tolist() == [0, 3, 3, 4]
    assert ragged.per_element(torch.tensor([7, 8, 9, 5]), lengths).tolist() == [7, 7, 7, 9, 5, 5]
    assert ragged.positions(lengths).tolist() == [0, 1, 2, 0, 0, 1]
    assert ragged.segments(lengths).tolist() == [0, 0, 0, 2, 3, 3]


def test_segment_sum_leaves_an_empty_segment_at_zero():
    sums = ragged.segment_sum(torch.tensor([1.5, 2.0, -4.0]), torch.tensor([2, 0, 2]), 4)
    assert sums.tolist() == [2.0, 0.0, -2.5, 0.0]


def test_segment_mean_by_hand():
    values = torch.tensor([1.0, 2.0, 6.0, -4.0, 0.5, 1.5], requires_grad=True)
    means = ragged.segment_mean(values, torch.tensor([3, 1, 2]))
    assert means.tolist() == [3, -4, 1]
    means.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1, 1 / 2, 1 / 2])


def test_no_segments_at_all():
    none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    assert ragged.starts(none).shape == ragged.positions(none).shape == (0,)
    assert ragged.per_element(nothing, none).shape == ragged.segment_mean(nothing, none).shape == (0,)
    assert ragged.segment_sum(nothing, none, 0).shape == (0,)
    assert ragged.pad(nothing, none).shape == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_pad_puts_every_segment_at_the_left(seed):
    segments = random_segments(seed)
    longest = max(map(len, segments))
    padded = ragged.pad(flat(segments), sizes(segments), value=-1)
    assert padded.tolist() == [segment + [-1] * (longest - len(segment)) for segment in segments]


@pytest.mark.parametrize("seed", range(20))
def test_token_budget_keeps_every_row_within_the_budget_longest_first(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 60))]
    max_tokens = rng.choice([0, 1, 20, 40, 100, 400])
    batches = ragged.token_budget(lengths, max_tokens)
    order = [row for batch in batches for row in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    if max_tokens == 0:
        assert len(batches) == 1
        return
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= max_tokens
    # No batch is left before it is full: the next row would not have fitted.
    for batch, following in itertools.pairwise(batches):
        assert (len(batch) + 1) * max(lengths[row] for row in [*batch, following[0]]) > max_tokens


@pytest.mark.parametrize("max_tokens", [0, 1, 12, 25, 60])
def test_group_budget_keeps_groups_together_and_loses_no_row(max_tokens: int) -> None:
    prompt_lengths, group, lengths = [4, 2, 7], [0, 1, 2, 0, 1, 2, 0], [5, 9, 1, 3, 2, 8, 6]
    batches = ragged.group_budget(prompt_lengths, group, lengths, max_tokens)
    assert sorted(row for batch in batches for row in batch) == list(range(7))
    whole = {
        number: prompt_lengths[number] + sum(n for n, g in zip(lengths, group, strict=True) if g == number)
        for number in range(3)
    }
    for batch in batches:
        tokens = sum(lengths[row] for row in batch) + sum(
            prompt_lengths[number] for number in {group[row] for row in batch}
        )
        assert max_tokens == 0 or tokens <= max_tokens or len(batch) == 1
    for number, size in whole.items():
        parts = sum(any(group[row] == number for row in batch) for batch in batches)
        assert parts == 1 or size > max_tokens > 0


def test_group_budget_bounds_the_keys_of_a_micro_batch():
    # Two prompts of 10 tokens with 8 completions of one each: 18 tokens, and 8 * (10 + 1) = 88 keys.
    groups = [10, 10], [0] * 8 + [1] * 8, [1] * 16
    assert ragged.group_budget(*groups, max_tokens=44) == [[*range(16)]]  # 176 keys are four times 44
    assert ragged.group_budget(*groups, max_tokens=43) == [[*range(8)], [*range(8, 16)]]
