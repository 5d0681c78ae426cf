import math
import random

import pytest
import torch
from helpers.tiny import rollouts_of

from grpo_lightning.maths.filters import Truncated
from grpo_lightning.plugins.methods.token_weights.top_entropy import TopEntropy


def test_truncated_leaves_out_whole_completions_by_hand():
    rollouts = rollouts_of([2, 1, 3])
    rollouts.truncated = torch.tensor([False, True, False])
    assert Truncated()(rollouts).tolist() == [True, True, False, True, True, True]
    rollouts.truncated = torch.zeros(3, dtype=torch.bool)
    assert Truncated()(rollouts).all()


def test_top_entropy_by_hand():
    # Ten tokens of different entropies: 0 to 9 tenths of the others lie under them; the upper fifth are two.
    rollouts = rollouts_of([4, 6])
    rollouts.columns["entropy_rank"] = torch.tensor([0.3, 0.9, 0.0, 0.5, 0.7, 0.1, 0.8, 0.6, 0.2, 0.4])
    assert TopEntropy()(rollouts).nonzero().flatten().tolist() == [1, 6]
    assert TopEntropy(fraction=0.5)(rollouts).nonzero().flatten().tolist() == [1, 3, 4, 6, 7]
    assert TopEntropy(fraction=1.0)(rollouts).all()


@pytest.mark.parametrize("count", [1, 10, 97])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.7])
def test_of_tokens_that_all_differ_the_share_stays_rounded_down(count, share):
    # 0.1 * 10 is 1 in spite of rounding.
    order = random.Random(count).sample(range(count), count)
    rollouts = rollouts_of([count])
    rollouts.columns["entropy_rank"] = torch.tensor(order) / count
    stays = TopEntropy(share)(rollouts).tolist()
    kept = [rank for rank, stay in zip(order, stays, strict=True) if stay]
    assert sorted(kept) == list(range(count - math.floor(count * share + 1e-6), count))


def test_tokens_of_equal_entropy_stay_or_go_together():
    # Of eight tokens the upper four are equal, and so are the lower four.
    rollouts = rollouts_of([8])
    rollouts.columns["entropy_rank"] = torch.tensor([0.0, 0.5] * 4)
    assert TopEntropy(fraction=0.5)(rollouts).tolist() == [False, True] * 4
