"""Agreement with the verifier, against numbers counted by hand."""

import math

import pytest
import torch

from grpo_lightning.plugins.learned.agreement import Agreement


def agreement(probability: list[float], label: list[float], group: list[int]) -> Agreement:
    return Agreement(
        torch.tensor(probability, dtype=torch.float64), torch.tensor(label, dtype=torch.float64), torch.tensor(group)
    )


TWO = agreement([0.9, 0.2, 0.6, 0.4, 0.4, 0.7], [1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1])


def test_pairwise_accuracy_within_prompts():
    # The first prompt: 0.9 over 0.2 and 0.6, both right. The second: 0.4 against 0.4 (half) and 0.7 (wrong).
    assert TWO.pairwise() == pytest.approx((1 + 0.25) / 2)


def test_auc_over_all_prompts():
    # 0.9 beats 0.2, 0.6, 0.4, 0.7; 0.4 beats 0.2, ties 0.4, loses to 0.6 and 0.7: 5.5 of 8.
    assert TWO.auc() == pytest.approx(5.5 / 8)


def test_brier_is_the_mean_squared_error():
    errors = [0.1, 0.2, 0.6, 0.6, 0.4, 0.7]
    assert TWO.brier() == pytest.approx(sum(e * e for e in errors) / 6)


def test_the_calibration_error_is_that_of_ten_bins():
    # Bins of width 0.1: {0.9: right}, {0.2}, {0.6}, {0.4: one of two right}, {0.7}.
    assert TWO.ece() == pytest.approx((0.1 + 0.2 + 0.6 + 2 * abs(0.4 - 0.5) + 0.7) / 6, abs=1e-6)


def test_the_correlation_is_pearsons():
    # Less their means 8/15 and 11/3, times 30 and 3: of the probability, and of the length.
    r, v = [11, -10, 2, -4, -4, 5], [-8, -5, -2, 1, 4, 10]
    expected = sum(a * b for a, b in zip(r, v, strict=True)) / math.sqrt(sum(a * a for a in r) * sum(b * b for b in v))
    assert TWO.correlation(torch.tensor([1, 2, 3, 4, 5, 7])) == pytest.approx(expected, abs=1e-6)


def test_what_is_undefined_is_nan():
    right = agreement([0.9, 0.2], [1, 1], [0, 0])
    assert all(math.isnan(number) for number in (right.pairwise(), right.auc(), right.correlation(right.label)))
    same = agreement([0.5, 0.5], [1, 0], [0, 0])
    assert math.isnan(same.correlation(same.label)) and same.pairwise() == 0.5


def test_large_scores_keep_their_order():
    score = torch.tensor([20.0, 19.0], dtype=torch.float64)
    assert Agreement(score.sigmoid(), torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).pairwise() == 1
