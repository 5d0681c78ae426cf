import random

import pytest
import torch

from grpo_lightning.maths.weightings import (
    BatchSize,
    FixedLength,
    GroupTokenMean,
    SequenceMean,
    TokenMean,
    TokenWeighting,
    Unweighted,
)


def weights(weighting: TokenWeighting, lengths: list[int]) -> list[float]:
    """Of a batch of one group that is seen whole."""
    batch = BatchSize(num_completions=len(lengths), num_groups=1, num_tokens=sum(lengths))
    return weighting(torch.tensor(lengths), torch.zeros(len(lengths), dtype=torch.int64), batch).tolist()


def test_sequence_mean_by_hand():
    assert weights(SequenceMean(), [2, 5, 1, 10]) == pytest.approx([1 / 8, 1 / 20, 1 / 4, 1 / 40])


def test_token_mean_by_hand():
    assert weights(TokenMean(), [2, 5, 1, 10]) == pytest.approx([1 / 18] * 4)


def test_fixed_length_by_hand():
    assert weights(FixedLength(16), [2, 5, 1, 10]) == pytest.approx([1 / 64] * 4)


def test_fixed_length_is_by_default_the_longest_that_the_run_allows():
    lengths, group = torch.tensor([2, 5, 1, 10]), torch.zeros(4, dtype=torch.int64)
    batch = BatchSize(num_completions=4, num_groups=1, num_tokens=18, max_new_tokens=32)
    assert FixedLength()(lengths, group, batch).tolist() == pytest.approx([1 / 128] * 4)
    assert FixedLength(16)(lengths, group, batch).tolist() == pytest.approx([1 / 64] * 4)


def test_group_token_mean_by_hand():
    # Groups of 2 + 6 = 8 and 1 + 3 + 1 = 5 tokens: 1 / (2 * 8) and 1 / (2 * 5), whatever the order of the rows.
    batch = BatchSize(num_completions=5, num_groups=2, num_tokens=13)
    weight = GroupTokenMean()(torch.tensor([1, 2, 3, 6, 1]), torch.tensor([1, 0, 1, 0, 1]), batch)
    assert weight.tolist() == pytest.approx([1 / 10, 1 / 16, 1 / 10, 1 / 16, 1 / 10])


@pytest.mark.parametrize("seed", range(5))
def test_group_token_mean_is_the_mean_over_groups_of_the_mean_over_their_tokens(seed):
    rng = random.Random(seed)
    groups = [[rng.randrange(1, 9) for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(1, 5))]
    values = [[[rng.gauss(0, 1) for _ in range(n)] for n in lengths] for lengths in groups]
    means = [sum(v for row in rows for v in row) / sum(map(len, rows)) for rows in values]
    lengths = torch.tensor([n for group in groups for n in group])
    group = torch.tensor([number for number, rows in enumerate(groups) for _ in rows])
    batch = BatchSize(num_completions=len(lengths), num_groups=len(groups), num_tokens=int(lengths.sum()))
    weight = GroupTokenMean()(lengths, group, batch).tolist()
    sums = [sum(row) for rows in values for row in rows]
    weighted = sum(w * s for w, s in zip(weight, sums, strict=True))
    assert weighted == pytest.approx(sum(means) / len(means), abs=1e-6)


def test_sum_by_hand():
    assert weights(Unweighted(), [2, 5, 1, 10]) == [1, 1, 1, 1]
