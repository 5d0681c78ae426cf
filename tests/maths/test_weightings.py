from typing import Any

import pytest
import torch
from helpers.contracts import needs

from grpo_lightning import BatchSize, SequenceMean, TokenMean, TokenWeighting, Unweighted
from grpo_lightning.command.overview import optional

FixedLength: Any = optional("FixedLength")
GroupTokenMean: Any = optional("GroupTokenMean")


def weights(weighting: TokenWeighting, lengths: list[int]) -> list[float]:
    """Of a batch of one group that is seen whole."""
    batch = BatchSize(num_completions=len(lengths), num_groups=1, num_tokens=sum(lengths))
    return weighting(torch.tensor(lengths), torch.zeros(len(lengths), dtype=torch.int64), batch).tolist()


def test_weights_by_hand():
    lengths = [2, 5, 1, 10]
    assert weights(SequenceMean(), lengths) == pytest.approx([1 / 8, 1 / 20, 1 / 4, 1 / 40])
    assert weights(TokenMean(), lengths) == pytest.approx([1 / 18] * 4)
    assert weights(Unweighted(), lengths) == [1, 1, 1, 1]


@needs(FixedLength)
def test_a_fixed_length_by_hand():
    assert weights(FixedLength(16), [2, 5, 1, 10]) == pytest.approx([1 / 64] * 4)


@needs(FixedLength)
def test_fixed_length_is_by_default_the_longest_that_the_run_allows():
    lengths, group = torch.tensor([2, 5, 1, 10]), torch.zeros(4, dtype=torch.int64)
    batch = BatchSize(num_completions=4, num_groups=1, num_tokens=18, max_new_tokens=32)
    assert FixedLength()(lengths, group, batch).tolist() == pytest.approx([1 / 128] * 4)


@needs(GroupTokenMean)
def test_group_token_mean_by_hand():
    # Groups of 2 + 6 = 8 and 1 + 3 + 1 = 5 tokens: 1 / (2 * 8) and 1 / (2 * 5), whatever the order of the rows.
    batch = BatchSize(num_completions=5, num_groups=2, num_tokens=13)
    weight = GroupTokenMean()(torch.tensor([1, 2, 3, 6, 1]), torch.tensor([1, 0, 1, 0, 1]), batch)
    assert weight.tolist() == pytest.approx([1 / 10, 1 / 16, 1 / 10, 1 / 16, 1 / 10])
