import math
from typing import Any

import numpy as np
import pytest

from grpo_lightning.maths.metrics import (
    clustered_half_width,
    half_width,
    majority_at_k,
    nan_mean,
    pass_at_k,
    t_quantile,
)

BESTS = [
    ([0, 0, 1], 1), ([0, 0, 0], 0), ([0.25, -1], 0.25), ([math.nan, 0], 0), ([math.nan, 1], 1), ([math.nan], math.nan),
]  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), BESTS)
def test_pass_at_k_is_the_best_graded_value(values, expected):
    assert pass_at_k(values) == pytest.approx(expected, nan_ok=True)


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
        ([math.nan, math.nan, 1], ["7", "7", "8"], 1),  # What failed has no vote.
        ([math.nan, 0], ["7", None], 0),
        ([math.nan], ["7"], math.nan),
    ],
)
def test_majority_at_k_counts_the_most_frequent_answer(values, answers, expected):
    assert majority_at_k(values, answers) == pytest.approx(expected, nan_ok=True)


def test_majority_at_k_refuses_lists_of_two_lengths():
    with pytest.raises(ValueError, match="shorter"):
        majority_at_k([1, 0], ["7"])


def test_nan_mean_leaves_out_nan():
    assert nan_mean([1, math.nan, 4]) == 2.5
    assert nan_mean([True, False, False, False]) == 0.25
    assert math.isnan(nan_mean([math.nan]))
    assert math.isnan(nan_mean([]))


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.3027), (30, 2.0423), (31, 2.0395), (40, 2.0211), (1000, 1.9623)]
)
def test_t_quantiles_are_those_of_the_tables(df: int, t: float):
    assert t_quantile(df) == pytest.approx(t, abs=1e-4)


def test_the_interval_of_a_mean_over_seeds():
    """1, 2, 3: s = 1, t(2) = 4.3027, half = 4.3027 / √3 = 2.4842."""
    assert half_width(3, 6.0, 14.0) == pytest.approx(2.4842, abs=1e-4)
    assert half_width(4, 4.0, 4.0) == 0
    assert math.isnan(half_width(1, 1.0, 1.0))


RATES = [0.01, 0.05, 0.5, 0.95, (1, 1), (0.2, 0.2), (0.1, 1.9), (0.05, 4.95)]
"""The pass rate of every question, or the Beta distribution that each question has its own of."""


@pytest.mark.parametrize("questions", [30, 100, 300])
@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("rates", RATES, ids=str)
def test_the_interval_covers_in_95_percent_of_benchmarks(questions: int, k: int, rates: Any):
    """1,000 simulated benchmarks; 95 ± 2 % where the interval is symmetric, more where it has a larger side."""
    random = np.random.default_rng(0)
    mean = rates[0] / sum(rates) if isinstance(rates, tuple) else rates
    size = (1000, questions)
    rate = random.beta(*rates, size) if isinstance(rates, tuple) else np.full(size, mean)
    value = random.binomial(k, rate) / k
    halves = np.array([clustered_half_width(row) for row in value.tolist()])
    covered = np.mean(abs(value.mean(1) - mean) <= halves)
    assert covered >= 0.93
    assert mean != 0.5 or covered <= 0.97
    # It is conservative, not vague: at most twice as wide as if the spread between questions were known.
    ideal = 1.96 * (value.std() ** 2 / questions) ** 0.5
    assert halves.mean() < 2 * ideal or mean * questions < 3
    as_if_independent = 1.96 * (mean * (1 - mean) / (questions * k)) ** 0.5
    assert k == 1 or mean != 0.5 or rates == 0.5 or np.mean(abs(value.mean(1) - 0.5) <= as_if_independent) < 0.9


@pytest.mark.parametrize(("count", "t"), [(20, 2.0930), (30, 2.0452)])
def test_the_interval_of_no_right_answer_is_not_0(count: int, t: float):
    """Wilson's of 0 of n answers ends at z²/(n + z²), here with Student's t of n - 1."""
    for value in (0.0, 1.0):
        assert clustered_half_width([value] * count) == pytest.approx(t * t / (count + t * t), abs=1e-4)


def test_values_outside_0_to_1_have_t_intervals():
    assert clustered_half_width([1.0, 2.0, 3.0]) == pytest.approx(2.4842, abs=1e-4)  # t(2) / √3
    assert clustered_half_width([-0.5, 0.5]) == pytest.approx(12.7062 / 2, abs=1e-4)
    assert clustered_half_width([0.7] * 5) == pytest.approx(0, abs=1e-9)
    assert math.isnan(clustered_half_width([1.0]))
    # Scores from 0 to 1 are as sure as they vary: the t interval, for many of them.
    scores = np.random.default_rng(0).normal(0.7, 0.01, 500).tolist()
    plain = half_width(500, sum(scores), sum(score * score for score in scores))
    assert clustered_half_width(scores) == pytest.approx(plain, rel=0.02)
