import math

import pytest
import torch
from helpers.reward_batches import batch_of

from grpo_lightning.maths.reward_batch import RewardBatch, SegmentRewards


def rows_of(segments: SegmentRewards | None) -> list[tuple[int, int, float]]:
    assert segments is not None
    return list(zip(segments.row.tolist(), segments.end.tolist(), segments.value.tolist(), strict=True))


FIRST = batch_of([[1, 2, 3], [10, 20, 30]], [1.0, 0.5], [0, 1, 0], [4, 1, 2], [None, [[(1, 0.1)], [], [(0, 0.2)]]])
SECOND = batch_of([[4, 5], [40, math.nan]], [1.0, 0.5], [1, 0], [3, 5], [None, [[], [(4, 0.3)]]])
NOBODY = batch_of([[], []], [1.0, 0.5], [], [])


def test_the_total_is_the_weighted_sum_and_nan_where_a_reward_failed():
    # 1 + 10/2, 2 + 20/2, 3 + 30/2; 4 + 40/2.
    assert FIRST.total.tolist() == [6, 12, 18]
    assert SECOND.total.tolist() == pytest.approx([24, math.nan], nan_ok=True)
    assert FIRST.total.dtype == torch.float64


def test_plus_adds_a_reward_for_the_whole():
    more = FIRST.plus(torch.tensor([1.0, -1.0, 0.5]), weight=-2.0)
    assert more.value.tolist() == [[1, 2, 3], [10, 20, 30], [1, -1, 0.5]]
    assert more.weight.tolist() == [1, 0.5, -2]
    assert more.total.tolist() == [4, 14, 17]
    assert more.segments[:2] == FIRST.segments and more.segments[2] is None
    assert more.value.dtype == more.weight.dtype == torch.float64
    assert len(FIRST.weight) == 2


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_concat_numbers_rows_and_groups_on_past_empty_batches(place):
    batches = [FIRST, SECOND]
    if place is not None:
        batches.insert(place, NOBODY)
    both = RewardBatch.concat(batches)
    assert both.value.tolist()[0] == [1, 2, 3, 4, 5]
    assert both.value.tolist()[1] == pytest.approx([10, 20, 30, 40, math.nan], nan_ok=True)
    assert both.weight.tolist() == [1, 0.5]
    assert both.group.tolist() == [0, 1, 0, 3, 2]
    assert both.lengths.tolist() == [4, 1, 2, 3, 5]
    assert both.segments[0] is None
    assert rows_of(both.segments[1]) == [(0, 1, 0.1), (2, 0, 0.2), (4, 4, 0.3)]
    assert RewardBatch.concat([NOBODY, NOBODY]).total.shape == (0,)
