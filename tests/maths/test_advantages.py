import math
import random
from typing import Any

import pytest
import torch
from helpers.contracts import needs
from helpers.reward_batches import batch_of, float64_group_std, of

from grpo_lightning.command.overview import optional
from grpo_lightning.maths.advantages import (
    GroupMean,
    GroupStd,
    NoBaseline,
    has_spread,
)

PerRewardStd: Any = optional("PerRewardStd")
LeaveOneOut: Any = optional("LeaveOneOut")
BatchStd: Any = optional("BatchStd")
Sign: Any = optional("Sign")


def advantage(rewards: list[float], group: list[int] | None = None, **kwargs) -> list[float]:
    estimator = GroupStd(**kwargs)
    return estimator(torch.tensor(rewards), torch.tensor(group or [0] * len(rewards))).tolist()


def test_eps_is_added_to_the_std():
    # (1 - 2) / (1 + 0.25)
    assert advantage([1, 2, 3], advantage_eps=0.25) == pytest.approx([-0.8, 0, 0.8])


def test_defaults_are_the_sample_std_and_one_millionth():
    assert advantage([0, 1]) == pytest.approx([-0.5 / (math.sqrt(0.5) + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)], rel=1e-7)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_group_std_agrees_with_a_float64_loop(seed, std, ddof):
    rng = random.Random(seed)
    count = rng.randrange(1, 30)
    group = [rng.randrange(5) for _ in range(count)]
    rewards = [rng.choice([0.0, 1.0, rng.gauss(0, 3), math.nan]) for _ in range(count)]
    expected = float64_group_std(torch.tensor(rewards).tolist(), group, ddof)
    assert advantage(rewards, group, std=std) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_has_spread_ignores_nan_and_empty_groups():
    reward = torch.tensor([1.0, 1.0, 2.0, math.nan, 3.0, math.nan, 0.5, 0.6, 0.0, 1.0, math.nan])
    group = torch.tensor([0, 0, 1, 1, 3, 4, 5, 5, 6, 6, 6])
    # Equal; one number and a NaN; nobody; one number; only NaN; two numbers; two numbers and a NaN.
    assert has_spread(reward, group, 7).tolist() == [False, False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ([[1, 0, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1]], [0.1, 0.2, 0.3]),  # 0.30000000000000004 and 0.3
        ([[1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0]], [0.1, 0.2, -0.3]),  # 5.6e-17 and 0
    ],
)
def test_totals_that_differ_by_rounding_alone_are_equal(values: list[list[float]], weights: list[float]):
    batch = batch_of(values, weights, [0] * 4, [1] * 4)
    sums = [sum(w * v for w, v in zip(weights, column, strict=True)) for column in zip(*values, strict=True)]
    assert len({*sums}) == 2
    assert not has_spread(batch.total, batch.group, 1)
    with_plugins = [LeaveOneOut(), BatchStd(advantage_eps=0), Sign()] if LeaveOneOut else []
    for estimator in (GroupMean(), GroupStd(advantage_eps=0), *with_plugins):
        assert estimator.per_token(batch).tolist() == [0] * 4
    # What is really small has spread, and so have large rewards that differ little.
    for rewards in ([0, 1e-12], [1e6, 1e6 + 1]):
        assert of(GroupStd(advantage_eps=0), rewards) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@needs(PerRewardStd)
def test_rewards_that_cancel_but_for_rounding_have_no_advantage():
    # Deviations of two thirds and minus two thirds, of which rounding is left, and the batch's std is no larger.
    batch = batch_of([[0.1, 0.2, 0.4]] * 3, [0.1, 0.2, -0.3], [0] * 3, [1] * 3)
    assert PerRewardStd(advantage_eps=0).per_token(batch).tolist() == [0] * 3


# The other members


def test_group_mean_by_hand():
    # Means 2 and 20.
    assert of(GroupMean(), [1, 10, 2, 3, 30], [0, 1, 0, 0, 1]) == [-1, -10, 0, 1, 10]


@needs(LeaveOneOut)
def test_leave_one_out_by_hand():
    # 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2; 10 - 30 and 30 - 10.
    assert of(LeaveOneOut(), [1, 10, 2, 6, 30], [0, 1, 0, 0, 1]) == pytest.approx([-3, -20, -1.5, 4.5, 20])


@needs(BatchStd)
def test_batch_std_by_hand():
    # Differences -1, 1, -3, 3 from the means 2 and 5: the mean of their squares is 5.
    expected = [-1 / math.sqrt(5), 1 / math.sqrt(5), -3 / math.sqrt(5), 3 / math.sqrt(5)]
    assert of(BatchStd(advantage_eps=0), [1, 3, 2, 8], [0, 0, 1, 1]) == pytest.approx(expected)
    # A group of equals counts in the batch with zeros: squares 1, 1, 0, 0, so a std of sqrt(1/2).
    expected = [-math.sqrt(2), math.sqrt(2), 0, 0]
    assert of(BatchStd(advantage_eps=0), [1, 3, 4, 4], [0, 0, 1, 1]) == pytest.approx(expected)
    # (1 - 2) / (1 + 0.25).
    assert of(BatchStd(advantage_eps=0.25), [1, 3]) == pytest.approx([-0.8, 0.8])


def test_no_baseline_by_hand():
    assert of(NoBaseline(), [0.5, -2, math.nan, 7], [0, 0, 0, 1]) == [0.5, -2, 0, 7]
    assert not NoBaseline.compares_group


@needs(Sign)
def test_sign_by_hand():
    # Means 0.25 and 2.
    assert of(Sign(), [0, 0, 1, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1]) == [-1, -1, 1, -1, -1, 0, 1]


@needs(Sign)
def test_sign_of_the_middle_is_zero_in_spite_of_rounding():
    assert (0.1 + 0.2 + 0.3) / 3 != 0.2
    assert of(Sign(), [0.1, 0.2, 0.3]) == [-1, 0, 1]
    # Neither does the rounding of float32 rewards count.
    assert Sign()(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 0, 0])).tolist() == [-1, 0, 1]


@needs(Sign)
def test_the_dead_zone_of_sign_is_in_units_of_reward():
    # Mean 5: differences -4, -1, 0, 1, 4; at the edge of the zone is inside.
    rewards = [1, 4, 5, 6, 9]
    assert of(Sign(dead_zone=0.5), rewards) == [-1, -1, 0, 1, 1]
    assert of(Sign(dead_zone=1.0), rewards) == [-1, 0, 0, 0, 1]
    assert of(Sign(dead_zone=4.0), rewards) == [0, 0, 0, 0, 0]
    assert of(Sign(dead_zone=1.0), [10 * r for r in rewards]) == [-1, -1, 0, 1, 1]


# Several rewards


@needs(PerRewardStd)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_per_reward_std_agrees_with_a_float64_loop(seed, std, ddof):
    rng = random.Random(seed)
    count, weights = rng.randrange(1, 20), [1.0, 0.3]
    group = [rng.randrange(4) for _ in range(count)]
    lengths = [rng.randrange(1, 4) for _ in range(count)]
    values = [[rng.choice([0.0, 1.0, rng.gauss(0, 5)]) for _ in range(count)] for _ in weights]
    # A failure of one reward leaves the completion out of the other's statistics too.
    values[1] = [math.nan if rng.random() < 0.2 else value for value in values[1]]
    failed = [math.isnan(value) for value in values[1]]
    sums = [0.0] * count
    for weight, rewards in zip(weights, values, strict=True):
        scored = [math.nan if bad else value for bad, value in zip(failed, rewards, strict=True)]
        for i, value in enumerate(float64_group_std(scored, group, ddof)):
            sums[i] += weight * value
    valid_sums = [value for value, bad in zip(sums, failed, strict=True) if not bad]
    scale = math.sqrt(math.fsum(v * v for v in valid_sums) / len(valid_sums)) + 1e-6 if valid_sums else 1.0
    expected = [value / scale for value, length in zip(sums, lengths, strict=True) for _ in range(length)]
    result = PerRewardStd(std=std).per_token(batch_of(values, weights, group, lengths)).tolist()
    assert result == pytest.approx(expected, rel=1e-5, abs=1e-6)
