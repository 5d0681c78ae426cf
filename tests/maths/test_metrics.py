import math
import random

import numpy as np
import pytest

from grpo_lightning.maths.metrics import half_width, majority_at_k, nan_mean, pass_at_k, t_quantile

BESTS = [
    ([0, 0, 1], 1), ([0, 0, 0], 0), ([0.25, -1], 0.25), ([math.nan, 0], 0), ([math.nan, 1], 1), ([math.nan], math.nan),
]  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), BESTS)
def test_pass_at_k_is_the_best_of_what_was_judged(values, expected):
    assert pass_at_k(values) == pytest.approx(expected, nan_ok=True)


def test_no_mean_is_above_the_best():
    rng = random.Random(0)
    for verdicts in ([0.0, 1.0, math.nan], [-1.0, 0.25, 0.75, 3.0, math.nan]):
        for _ in range(200):
            values = rng.choices(verdicts, k=rng.randint(1, 6))
            best, most = pass_at_k(values), majority_at_k(values, rng.choices(["7", "8", None], k=len(values)))
            assert not nan_mean(values) > best and (not most > best or most == 0)
            assert math.isnan(best) == math.isnan(most) == math.isnan(nan_mean(values)) == all(map(math.isnan, values))


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


def test_the_interval_clusters_by_question():
    """1, 2, 3: s = 1, t(2) = 4.3027, half = 4.3027 / √3 = 2.4842."""
    assert half_width(3, 6.0, 14.0) == pytest.approx(2.4842, abs=1e-4)
    assert half_width(4, 4.0, 4.0) == 0
    assert math.isnan(half_width(1, 1.0, 1.0))


@pytest.mark.parametrize(("questions", "k"), [(30, 32), (100, 4), (500, 1)])
def test_the_interval_covers_in_95_percent_of_benchmarks(questions: int, k: int):
    """1,000 simulated benchmarks of correlated samples: each question has a pass rate of its own, Beta(1, 1)."""
    random = np.random.default_rng(0)
    value = random.binomial(k, random.beta(1, 1, (1000, questions))) / k
    halves = np.array([half_width(questions, row.sum(), (row * row).sum()) for row in value])
    covered = np.mean(abs(value.mean(1) - 0.5) <= halves)
    assert covered == pytest.approx(0.95, abs=0.02)
    as_if_independent = 1.96 * (0.25 / (questions * k)) ** 0.5
    assert k == 1 or np.mean(abs(value.mean(1) - 0.5) <= as_if_independent) < 0.9
