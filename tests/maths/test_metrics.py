import math

import pytest

from grpo_lightning.maths.metrics import majority_at_k, nan_mean, pass_at_k


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 0, 1], 1),
        ([0, 0, 0], 0),
        ([0.5], 0),
        ([0.51, 0], 1),
        ([math.nan, 0], 0),
        ([math.nan, 1], 1),
        ([], 0),
    ],
)
def test_pass_at_k_asks_for_one_value_above_one_half(values, expected):
    assert pass_at_k(values) == expected


@pytest.mark.parametrize(
    ("values", "answers", "expected"),
    [
        ([0, 1, 0], ["7", "8", "7"], 0),
        ([1, 0, 1], ["7", "8", "7"], 1),
        ([0, 1], ["7", "8"], 0),  # A tie: the first answer counts.
        ([1, 0], ["7", "8"], 1),
        ([0, 0, 1, 1], ["7", "8", "9", "9"], 1),
        ([0, 0, 0, 1], [None, None, None, "8"], 1),  # No answer is not a vote.
        ([0, 0], [None, None], 0),
        ([math.nan, 0], ["7", "8"], 0),
        ([], [], 0),
    ],
)
def test_majority_at_k_counts_the_most_frequent_answer(values, answers, expected):
    assert majority_at_k(values, answers) == expected


def test_majority_at_k_refuses_lists_of_two_lengths():
    with pytest.raises(ValueError, match="shorter"):
        majority_at_k([1, 0], ["7"])


def test_nan_mean_leaves_out_nan():
    assert nan_mean([1, math.nan, 4]) == 2.5
    assert nan_mean([True, False, False, False]) == 0.25
    assert math.isnan(nan_mean([math.nan]))
    assert math.isnan(nan_mean([]))
