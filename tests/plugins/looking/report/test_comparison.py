import math

import pytest
from helpers.curves import arm, scalars

from grpo_lightning.plugins.looking.report.arm_comparison import (
    Estimate,
    Metric,
    coarsened,
    compare,
    curve,
    means,
    value_of,
    with_interval,
)


def cell(arms: dict, metric: str, name: str, axis: str = "step"):
    return compare(arms, [Metric.parse(metric)], axis).cells[name][0]


def test_last_value_and_paired_difference_by_hand():
    # Seeds differ by far more than the arms: the differences are 0.1, 0.2, 0.3; half = 4.3027 * 0.1 / √3 = 0.24842.
    base = arm(*(scalars([0.0, last]) for last in (1.0, 5.0, 9.0)))
    other = arm(*(scalars([0.0, last]) for last in (1.1, 5.2, 9.3)))
    first, second = cell({"a": base, "b": other}, "val/x", "a"), cell({"a": base, "b": other}, "val/x", "b")
    assert first.difference is None and first.estimate.mean == 5.0
    assert second.estimate.half > 9
    assert second.difference.mean == pytest.approx(0.2)
    assert second.difference.half == pytest.approx(0.24842, abs=1e-4)
    assert not second.difference.excludes_zero
    # 0.19, 0.2, 0.21: half = 4.3027 * 0.01 / √3 = 0.0248.
    other = arm(*(scalars([0.0, last]) for last in (1.19, 5.2, 9.21)))
    marked = cell({"a": base, "b": other}, "val/x", "b").difference
    assert marked.excludes_zero and with_interval(marked, "+") == "+0.200 ± 0.025"


def test_the_axis_of_updates_counts_those_made():
    run = scalars([0.3, 0.6, 0.7], updates_per_step=2) | {"optim/updates": [(0, 4.0), (1, 1.0), (2, 0.0)]}
    assert curve(run, "val/x", "step").x.tolist() == [1, 2, 3]
    assert curve(run, "val/x", "update").x.tolist() == [4, 5, 5]
    assert curve(scalars([0.3, 0.6]), "val/x", "update").x.tolist() == [1, 2]


def test_axes_of_time_and_tokens():
    run = scalars([0.1, 0.2, 0.3], updates_per_step=2) | {"time/step": [(0, 2.0), (1, 1.0), (2, 4.0)]}
    assert curve(run, "val/x", "seconds").x.tolist() == [2.0, 3.0, 7.0]
    assert curve(run, "val/x", "tokens").x.tolist() == [100.0, 200.0, 300.0]
    del run["time/step"]
    with pytest.raises(ValueError, match="time/step has not been logged"):
        curve(run, "val/x", "seconds")


def test_at_equal_time():
    # The slow arm is better at equal steps; when the fast one ends, at 4 seconds, it has made one step of 3 seconds.
    fast, slow = scalars([0.0, 0.1, 0.2, 0.3]), scalars([0.2, 0.4, 0.8, 1.0], seconds=3.0)
    arms = {"fast": arm(fast), "slow": arm(slow)}
    assert cell(arms, "val/x", "slow").difference.mean == pytest.approx(0.7)
    at_equal_time = cell(arms, "val/x", "slow", "seconds")
    assert at_equal_time.estimate.mean == 0.2 and at_equal_time.steps == [1]
    assert at_equal_time.difference.mean == pytest.approx(0.2 - 0.3)
    # From 3 to 4 seconds: the mean of 0.2 and 0.3, and the only point.
    assert cell(arms, "val/x:mean", "fast", "seconds").estimate.mean == pytest.approx(0.25)
    assert cell(arms, "val/x:mean", "slow", "seconds").estimate.mean == 0.2


def test_a_last_value_was_measured():
    """Validations at other steps than the end of the shorter run."""
    sparse = {"val/x": [(-1, 0.375), (5, 0.797)]}
    short = {"val/x": [(-1, 0.375), (2, 0.5)]}
    long = cell({"short": arm(short), "sparse": arm(sparse)}, "val/x", "sparse")
    assert long.estimate.mean == 0.375 and long.steps == [0]
    late = {"val/x": [(5, 0.797), (8, 0.9)]}
    unmeasured = cell({"short": arm(short), "late": arm(late)}, "val/x", "late")
    assert value_of(unmeasured) == "–" and unmeasured.difference is None
    assert unmeasured.reason == "nothing measured up to there"


def test_the_mean_of_the_last_points():
    arms = {"a": arm(scalars([0.0, 0.3, 0.6, 0.9])), "b": arm(scalars([0.5]))}
    assert cell({"a": arms["a"]}, "val/x:last3", "a").estimate.mean == pytest.approx(0.6)
    assert cell({"a": arms["a"]}, "val/x:last2", "a").estimate.mean == pytest.approx(0.75)
    # There are no two points up to the end of the shorter run.
    assert math.isnan(cell(arms, "val/x:last2", "b").estimate.mean)


def test_the_mean_is_the_area_by_the_width():
    run = {"val/x": [(-1, 0.0), (0, 0.4), (4, 0.8)]}
    # Steps 0, 1 and 5: (0.2 * 1 + 0.6 * 4) / 5.
    assert cell({"a": arm(run)}, "val/x:mean", "a").estimate.mean == pytest.approx(0.52)


def test_equal_values_have_no_interval_and_two_seeds_no_mark():
    base, other = arm(*(scalars([0.5]) for _ in range(3))), arm(*(scalars([0.25]) for _ in range(3)))
    equal = cell({"a": base, "b": other}, "val/x", "b").difference
    assert (equal.mean, equal.n) == (-0.25, 3) and math.isnan(equal.half) and not equal.excludes_zero
    assert with_interval(equal, "+") == "-0.25"
    two = arm(scalars([0.9]), scalars([0.9001]))
    marked = cell({"a": arm(scalars([0.5]), scalars([0.5])), "b": two}, "val/x", "b").difference
    assert 0 < marked.half < marked.mean and not marked.excludes_zero


def test_threshold():
    rising = arm(scalars([0.1, 0.5, 0.4, 0.9]), scalars([0.5, 0.5, 0.5, 0.5], seconds=2.0))
    arms = {"a": rising, "b": arm(scalars([0.6] * 4), scalars([0.1, 0.5, 0.5, 0.5]))}
    assert cell(arms, "val/x>=0.5", "a").values == {"0": 2.0, "1": 1.0}
    assert cell(arms, "val/x>=0.5", "a", "seconds").values == {"0": 2.0, "1": 2.0}
    assert cell(arms, "val/x<=0.4", "a").values == {"0": 1.0, "1": math.inf}
    # The run that never got there counts with its last x, 4.
    censored = cell(arms, "val/x<=0.4", "a")
    assert value_of(censored) == "≥ 2.5" and censored.difference is None
    assert cell(arms, "val/x<=0.4", "b").reason == "not all reached it"
    # Differences -1 and 1.
    assert cell(arms, "val/x>=0.5", "b").difference.mean == 0.0


def test_a_run_whose_value_is_nan_does_not_count():
    arms = {
        "a": arm(scalars([0.5, 1.0]), scalars([0.5, 2.0]), scalars([0.5, math.nan])),
        "b": arm(scalars([0.5, 1.5]), scalars([0.5, math.inf]), scalars([0.5, 9.0])),
    }
    assert [cell(arms, "val/x", name).estimate.n for name in "ab"] == [2, 2]
    assert (cell(arms, "val/x", "b").difference.mean, cell(arms, "val/x", "b").difference.n) == (0.5, 1)
    assert value_of(cell(arms, "val/x", "a")) == "1.5 ± 6.4"
    assert cell(arms, "val/x:mean", "a").estimate.mean == 1.0  # of 0.75 and 1.25
    assert cell(arms, "val/x>=1.5", "a").values == {"0": math.inf, "1": 2.0, "2": math.inf}


def test_numbers_have_the_digits_their_interval_allows():
    estimates = [
        (0.95678, 0.00412),
        (12.346, 0.5),
        (1234.6, 60.0),
        (0.123456, math.nan),
        (2e-7, 3.14e-8),
        (31170.4, math.nan),
    ]
    texts = [with_interval(Estimate(mean, half, 2)) for mean, half in estimates]
    assert texts == ["0.9568 ± 0.0041", "12.35 ± 0.50", "1235 ± 60", "0.123", "2e-07 ± 3.1e-08", "31170"]


def test_coarsened_by_hand():
    of = coarsened(curve(scalars([1.0, 2.0, math.nan, 6.0, 7.0], updates_per_step=2), "val/x", "update"), 2)
    # Steps 1-2, 3-4 and 5, whose last updates are 2, 4, 6, 8, 10.
    assert (of.step.tolist(), of.x.tolist(), of.y.tolist()) == ([2, 4, 6], [3, 7, 10], [1.5, 6.0, 7.0])
    gap = coarsened(curve(scalars([1.0, 1.0, math.nan, math.nan]), "val/x", "step"), 2)
    assert gap.y[0] == 1.0 and math.isnan(gap.y[1])
    sparse = {"val/x": [(3, 1.0), (7, 2.0), (9, 3.0)]}
    assert coarsened(curve(sparse, "val/x", "step"), 5).y.tolist() == [1.0, 2.5]
    # The validation before training is a point of its own.
    first = coarsened(curve({"val/x": [(-1, 9.0), (0, 1.0), (1, 2.0), (2, 3.0)]}, "val/x", "step"), 2)
    assert (first.step.tolist(), first.y.tolist()) == ([0, 2, 4], [9.0, 1.5, 3.0])


def test_means_leave_gaps_out():
    found = means([curve(scalars(values), "val/x", "step") for values in ([1.0, math.nan, 3.0], [3.0, 4.0])])
    assert [(x, y.mean, y.n) for x, y in found] == [(1, 2.0, 2), (2, 4.0, 1), (3, 3.0, 1)]
    # 1 and 3: s = √2, t(1) = 12.7062, half = 12.7062 * √2 / √2.
    assert found[0][1].half == pytest.approx(12.7062, abs=1e-4)


def test_a_validation_before_the_first_step_is_step_zero():
    run = scalars([0.1, 0.2, 0.3], updates_per_step=2)
    run["val/x"].insert(0, (-1, 0.05))
    for axis, x in (("step", [0, 1, 2, 3]), ("update", [0, 2, 4, 6]), ("seconds", [0, 1, 2, 3])):
        found = curve(run, "val/x", axis)
        assert (found.step.tolist(), found.x.tolist()) == ([0, 1, 2, 3], x)
        assert found.y.tolist() == [0.05, 0.1, 0.2, 0.3]
    # Beside a run without it, both are compared from step 1.
    arms = {"with": arm(run), "without": arm(scalars([0.1, 0.2, 0.3], updates_per_step=2))}
    assert cell(arms, "val/x:mean", "with").estimate.mean == cell(arms, "val/x:mean", "without").estimate.mean


def test_an_arm_that_has_not_logged_a_scalar_has_no_difference():
    arms = {"a": arm({"val/avg@4": [(0, 0.5)]}), "b": arm({"val/avg@8": [(0, 0.5)]})}
    for name in ("val/avg@4", "val/avg@8"):
        assert cell(arms, name, "b").reason == "not logged by both"
    assert cell({"a": arm(scalars([0.5])), "b": {"7": scalars([0.5])}}, "val/x", "b").reason == "no seed in common"
