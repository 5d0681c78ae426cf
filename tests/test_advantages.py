import math
import random

import pytest
import torch

from grpo_lightning.advantages import GroupStd, has_spread
from grpo_lightning.types import UsageError


def advantage(rewards: list[float], group: list[int] | None = None, **kwargs) -> list[float]:
    estimator = GroupStd(**kwargs)
    return estimator(torch.tensor(rewards), torch.tensor(group or [0] * len(rewards))).tolist()


def reference(rewards: list[float], group: list[int], eps: float, ddof: int) -> list[float]:
    """CS336 Eq. 28 in float64 loops, of the numbers a float32 tensor holds."""
    rewards = torch.tensor(rewards).tolist()
    result = []
    for reward, own in zip(rewards, group, strict=True):
        others = [r for r, g in zip(rewards, group, strict=True) if g == own and not math.isnan(r)]
        if math.isnan(reward) or len(others) < 2 or min(others) == max(others):
            result.append(0.0)
            continue
        mean = math.fsum(others) / len(others)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in others) / (len(others) - ddof))
        result.append((reward - mean) / (std + eps))
    return result


def test_sample_std_by_hand():
    # Mean 0.5, squared deviations 4 x 0.25 = 1, std sqrt(1/3) = 0.57735: 0.5 / 0.57735 = 0.866025.
    assert advantage([1, 0, 0, 1], advantage_eps=0) == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])
    # Mean 2, squared deviations 1 + 0 + 1 = 2, std sqrt(2/2) = 1.
    assert advantage([1, 2, 3], advantage_eps=0) == pytest.approx([-1, 0, 1])


def test_population_std_by_hand():
    # std sqrt(1/4) = 0.5 and sqrt(2/3) = 0.8164966.
    assert advantage([1, 0, 0, 1], advantage_eps=0, std="population") == pytest.approx([1, -1, -1, 1])
    assert advantage([1, 2, 3], advantage_eps=0, std="population") == pytest.approx([-1.2247449, 0, 1.2247449])


def test_eps_is_added_to_the_std():
    # (1 - 2) / (1 + 0.25)
    assert advantage([1, 2, 3], advantage_eps=0.25) == pytest.approx([-0.8, 0, 0.8])


def test_defaults_are_the_sample_std_and_one_millionth():
    assert advantage([0, 1]) == pytest.approx([-0.5 / (math.sqrt(0.5) + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)], rel=1e-7)


def test_groups_do_not_see_each_other():
    # Group 1: 10, 30 -> mean 20, std sqrt(200) = 14.142. Group 0: 0, 1 -> mean 0.5, std 0.70711.
    values = advantage([10, 0, 30, 1], [1, 0, 1, 0], advantage_eps=0)
    assert values == pytest.approx([-0.7071068, -0.7071068, 0.7071068, 0.7071068])


def test_a_group_of_one_gets_zero():
    assert advantage([5.0, 1.0, 2.0], [0, 1, 1], advantage_eps=0)[0] == 0
    assert advantage([5.0], std="population", advantage_eps=0) == [0]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -0.7, 1e-30, 1e30])
@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_get_exactly_zero(value, std, eps):
    # The mean of eight 0.1 need not be 0.1 in floating point; a deviation of 1e-17 would still push.
    assert advantage([value] * 8, std=std, advantage_eps=eps) == [0.0] * 8
    assert advantage([value] * 7 + [math.nan], std=std, advantage_eps=eps) == [0.0] * 8


def test_nan_rewards_are_left_out_and_get_zero():
    # As [1, 2, 3] alone.
    values = advantage([1, math.nan, 2, 3, math.nan], advantage_eps=0)
    assert values == pytest.approx([-1, 0, 0, 1, 0])
    assert values[1] == values[4] == 0


def test_a_group_whose_one_number_is_among_nans_gets_zero():
    assert advantage([math.nan, 3.0, math.nan]) == [0, 0, 0]


def test_all_nan_gets_zero():
    assert advantage([math.nan] * 4, [0, 0, 1, 1]) == [0] * 4


def test_a_group_of_nans_does_not_disturb_the_others():
    assert advantage([math.nan, 1, math.nan, 2, 3], [1, 0, 1, 0, 0], advantage_eps=0) == pytest.approx([0, -1, 0, 0, 1])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_agrees_with_a_float64_loop_and_does_not_depend_on_the_order_of_rows(seed, std, ddof):
    chance = random.Random(seed)
    count = chance.randrange(1, 30)
    group = [chance.randrange(5) for _ in range(count)]
    rewards = [chance.choice([0.0, 1.0, chance.gauss(0, 3), math.nan]) for _ in range(count)]
    expected = reference(rewards, group, 1e-6, ddof)
    assert advantage(rewards, group, std=std) == pytest.approx(expected, rel=1e-6, abs=1e-7)
    order = chance.sample(range(count), count)
    permuted = advantage([rewards[i] for i in order], [group[i] for i in order], std=std)
    assert permuted == pytest.approx([expected[i] for i in order], rel=1e-6, abs=1e-7)


def test_large_rewards_that_differ_little_keep_their_difference():
    # 1000000 and 1000001 in float32 statistics would lose the deviation; mean 1000000.5, std sqrt(0.5).
    assert advantage([1000000, 1000001], advantage_eps=0) == pytest.approx([-0.7071068, 0.7071068])


def test_advantages_are_float32():
    result = GroupStd()(torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0, 0]))
    assert result.dtype == torch.float32


def test_has_spread_ignores_nan_and_empty_groups():
    reward = torch.tensor([1.0, 1.0, 2.0, math.nan, 3.0, math.nan, 0.5, 0.6])
    group = torch.tensor([0, 0, 1, 1, 3, 4, 5, 5])
    # Equal; one number and a NaN; nobody; one number; only NaN; two numbers.
    assert has_spread(reward, group, 6).tolist() == [False, False, False, False, False, True]


def test_a_negative_eps_is_refused_by_name():
    with pytest.raises(UsageError, match=r"advantage_eps=-0\.1"):
        GroupStd(advantage_eps=-0.1)
