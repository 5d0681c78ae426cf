import math
import random

import pytest
import torch

from grpo_lightning.maths.advantages import (
    AdvantageEstimator,
    BatchStd,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    NoBaseline,
    PerRewardStd,
    Sign,
    has_spread,
)
from grpo_lightning.maths.process_supervision import ProcessSupervision
from grpo_lightning.maths.reward_batch import RewardBatch, SegmentRewards
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


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -0.7, 1e-30, 1e30])
@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_get_exactly_zero(value, std, eps):
    # The mean of eight 0.1 need not be 0.1 in floating point; a deviation of 1e-17 would still push.
    assert advantage([value] * 8, std=std, advantage_eps=eps) == [0.0] * 8
    assert advantage([value] * 7 + [math.nan], std=std, advantage_eps=eps) == [0.0] * 8


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_agrees_with_a_float64_loop_and_does_not_depend_on_the_order_of_rows(seed, std, ddof):
    rng = random.Random(seed)
    count = rng.randrange(1, 30)
    group = [rng.randrange(5) for _ in range(count)]
    rewards = [rng.choice([0.0, 1.0, rng.gauss(0, 3), math.nan]) for _ in range(count)]
    expected = reference(rewards, group, 1e-6, ddof)
    assert advantage(rewards, group, std=std) == pytest.approx(expected, rel=1e-6, abs=1e-7)
    order = rng.sample(range(count), count)
    permuted = advantage([rewards[i] for i in order], [group[i] for i in order], std=std)
    assert permuted == pytest.approx([expected[i] for i in order], rel=1e-6, abs=1e-7)


def test_large_rewards_that_differ_little_keep_their_difference():
    # 1000000 and 1000001 in float32 statistics would lose the deviation; mean 1000000.5, std sqrt(0.5).
    assert advantage([1000000, 1000001], advantage_eps=0) == pytest.approx([-0.7071068, 0.7071068])


def test_has_spread_ignores_nan_and_empty_groups():
    reward = torch.tensor([1.0, 1.0, 2.0, math.nan, 3.0, math.nan, 0.5, 0.6])
    group = torch.tensor([0, 0, 1, 1, 3, 4, 5, 5])
    # Equal; one number and a NaN; nobody; one number; only NaN; two numbers.
    assert has_spread(reward, group, 6).tolist() == [False, False, False, False, False, True]


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
    for estimator in (Sign(), GroupMean(), LeaveOneOut(), GroupStd(advantage_eps=0), BatchStd(advantage_eps=0)):
        assert estimator.per_token(batch).tolist() == [0] * 4
    # What is really small has spread, and so have large rewards that differ little.
    for rewards in ([0, 1e-12], [1e6, 1e6 + 1]):
        assert of(Sign(), rewards) == [-1, 1]


def test_rewards_that_cancel_but_for_rounding_push_nothing():
    # Deviations of two thirds and minus two thirds, of which rounding is left, and the batch's std is no larger.
    batch = batch_of([[0.1, 0.2, 0.4]] * 3, [0.1, 0.2, -0.3], [0] * 3, [1] * 3)
    assert PerRewardStd(advantage_eps=0).per_token(batch).tolist() == [0] * 3


# The other members


def of(estimator: AdvantageEstimator, rewards: list[float], group: list[int] | None = None) -> list[float]:
    reward = torch.tensor(rewards, dtype=torch.float64)
    return estimator(reward, torch.tensor(group or [0] * len(rewards))).tolist()


def test_group_mean_by_hand():
    # Means 2 and 20.
    assert of(GroupMean(), [1, 10, 2, 3, 30], [0, 1, 0, 0, 1]) == [-1, -10, 0, 1, 10]


def test_leave_one_out_by_hand():
    # 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2; 10 - 30 and 30 - 10.
    assert of(LeaveOneOut(), [1, 10, 2, 6, 30], [0, 1, 0, 0, 1]) == pytest.approx([-3, -20, -1.5, 4.5, 20])


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


def test_sign_by_hand():
    # Means 0.25 and 2.
    assert of(Sign(), [0, 0, 1, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1]) == [-1, -1, 1, -1, -1, 0, 1]


def test_sign_of_the_middle_is_zero_in_spite_of_rounding():
    assert (0.1 + 0.2 + 0.3) / 3 != 0.2
    assert of(Sign(), [0.1, 0.2, 0.3]) == [-1, 0, 1]
    # Neither does the rounding of float32 rewards count.
    assert Sign()(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 0, 0])).tolist() == [-1, 0, 1]


def test_the_dead_zone_of_sign_is_in_units_of_reward():
    # Mean 5: differences -4, -1, 0, 1, 4; at the edge of the zone is inside.
    rewards = [1, 4, 5, 6, 9]
    assert of(Sign(dead_zone=0.5), rewards) == [-1, -1, 0, 1, 1]
    assert of(Sign(dead_zone=1.0), rewards) == [-1, 0, 0, 0, 1]
    assert of(Sign(dead_zone=4.0), rewards) == [0, 0, 0, 0, 0]
    assert of(Sign(dead_zone=1.0), [10 * r for r in rewards]) == [-1, -1, 0, 1, 1]


def members_of(values: list[float], group: list[int], own: int) -> list[float]:
    return [v for v, g in zip(values, group, strict=True) if g == own and not math.isnan(v)]


def deviations(values: list[float], group: list[int]) -> list[float]:
    """r_i less the mean of its group, and NaN where it is NaN."""
    means = {g: math.fsum(m) / len(m) for g in set(group) if (m := members_of(values, group, g))}
    return [v - means[g] if not math.isnan(v) else v for v, g in zip(values, group, strict=True)]


def leave_one_out(values: list[float], group: list[int]) -> list[float]:
    result = []
    for i, (value, own) in enumerate(zip(values, group, strict=True)):
        others = [
            v for j, (v, g) in enumerate(zip(values, group, strict=True)) if g == own and j != i and not math.isnan(v)
        ]
        result.append(value - math.fsum(others) / len(others) if others else 0.0)
    return result


def batch_std(values: list[float], group: list[int]) -> list[float]:
    differences = deviations(values, group)
    known = [d for d in differences if not math.isnan(d)]
    std = math.sqrt(math.fsum(d * d for d in known) / len(known)) if known else 0.0
    return [d / (std + 1e-6) for d in differences]


REFERENCES = {
    "GroupMean": (GroupMean(), deviations),
    "LeaveOneOut": (LeaveOneOut(), leave_one_out),
    "BatchStd": (BatchStd(), batch_std),
    "NoBaseline": (NoBaseline(), lambda values, group: values),
    "Sign": (
        Sign(dead_zone=0.3),
        lambda values, group: [math.copysign(1, d) if abs(d) > 0.3 else 0.0 for d in deviations(values, group)],
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(4))
def test_members_agree_with_float64_loops(name, seed):
    estimator, reference_of = REFERENCES[name]
    rng = random.Random(seed)
    count = rng.randrange(1, 30)
    group = [rng.randrange(5) for _ in range(count)]
    rewards = [rng.choice([0.0, 1.0, rng.gauss(0, 3), math.nan]) for _ in range(count)]
    expected = [0.0 if math.isnan(value) else value for value in reference_of(rewards, group)]
    assert of(estimator, rewards, group) == pytest.approx(expected, rel=1e-6, abs=1e-6)


# Several rewards


def batch_of(
    values: list[list[float]],
    weights: list[float],
    group: list[int],
    lengths: list[int],
    steps: list[list[list[tuple[int, float]]] | None] | None = None,
) -> RewardBatch:
    """K rewards of B completions; the steps of a reward as (end, value) of each completion."""

    def ragged(of_reward: list[list[tuple[int, float]]] | None) -> SegmentRewards | None:
        if of_reward is None:
            return None
        flat = [(row, end, value) for row, own in enumerate(of_reward) for end, value in own]
        return SegmentRewards(
            row=torch.tensor([row for row, _, _ in flat], dtype=torch.int64),
            end=torch.tensor([end for _, end, _ in flat], dtype=torch.int64),
            value=torch.tensor([value for _, _, value in flat], dtype=torch.float64),
        )

    return RewardBatch(
        value=torch.tensor(values, dtype=torch.float64),
        weight=torch.tensor(weights, dtype=torch.float64),
        group=torch.tensor(group),
        lengths=torch.tensor(lengths),
        segments=[ragged(own) for own in steps or [None] * len(values)],
    )


def per_completion(result: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    assert result.dtype == torch.float32
    return [part.tolist() for part in result.split(lengths)]


def test_the_sum_of_rewards_is_what_a_group_is_compared_by():
    # Totals 1 + 2 * 0, 0 + 2 * 1, 1 + 2 * 1 = 1, 2, 3: mean 2, std 1.
    batch = batch_of([[1, 0, 1], [0, 1, 1]], [1, 2], [0, 0, 0], [2, 1, 3])
    result = GroupStd(advantage_eps=0).per_token(batch)
    assert result.tolist() == pytest.approx([-1, -1, 0, 1, 1, 1])


def test_per_reward_std_by_hand():
    # Rewards 1, 2, 3 and 300, 100, 200, each -1, 0, 1 and 1, -1, 0 when normalised; weights 1 and 2:
    # 1, -2, 1, of std sqrt(6/3) over the batch.
    batch = batch_of([[1, 2, 3], [300, 100, 200]], [1, 2], [0, 0, 0], [1, 2, 1])
    expected = [1 / math.sqrt(2), -math.sqrt(2), -math.sqrt(2), 1 / math.sqrt(2)]
    assert PerRewardStd(advantage_eps=0).per_token(batch).tolist() == pytest.approx(expected)


def test_per_reward_std_tells_apart_what_the_sum_does_not():
    # Beside a completion without any reward stands one with one of two, and in the other group one with both. By the
    # sums, 0 and 1 or 0 and 2, the groups look the same.
    batch = batch_of([[0, 0, 0, 1], [0, 1, 0, 1]], [1, 1], [0, 0, 1, 1], [1, 1, 1, 1])
    same = GroupStd(advantage_eps=0).per_token(batch).tolist()
    assert same == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)] * 2)
    # A of the first group ∓0.7071, of the second twice that; the mean of the squares is (0.5 + 2) / 2.
    apart = PerRewardStd(advantage_eps=0).per_token(batch).tolist()
    assert apart == pytest.approx([-math.sqrt(0.4), math.sqrt(0.4), -math.sqrt(1.6), math.sqrt(1.6)])


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
    for weight, own in zip(weights, values, strict=True):
        known = [math.nan if bad else value for bad, value in zip(failed, own, strict=True)]
        for i, value in enumerate(float64_group_std(known, group, ddof)):
            sums[i] += weight * value
    kept = [value for value, bad in zip(sums, failed, strict=True) if not bad]
    scale = math.sqrt(math.fsum(v * v for v in kept) / len(kept)) + 1e-6 if kept else 1.0
    expected = [value / scale for value, length in zip(sums, lengths, strict=True) for _ in range(length)]
    result = PerRewardStd(std=std).per_token(batch_of(values, weights, group, lengths)).tolist()
    assert result == pytest.approx(expected, rel=1e-5, abs=1e-6)


def float64_group_std(values: list[float], group: list[int], ddof: int) -> list[float]:
    """Normalised over the group; 0 where it is NaN and where the group has no spread."""
    result = []
    for deviation, own in zip(deviations(values, group), group, strict=True):
        others = members_of(values, group, own)
        if math.isnan(deviation) or min(others) == max(others):
            result.append(0.0)
            continue
        mean = math.fsum(others) / len(others)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in others) / (len(others) - ddof))
        result.append(deviation / (std + 1e-6))
    return result


# Steps


def test_process_supervision_by_hand():
    # Steps worth 2 and 3 in the first completion and 1 in the second: mean 2, std 1, so 0, 1 and -1.
    # A token gets what the steps that end at it or later are worth; the last token of the first is behind them all.
    steps = [[(0, 2.0), (2, 3.0)], [(1, 1.0)]]
    batch = batch_of([[0, 0]], [1], [0, 0], [4, 2], [steps])
    result = ProcessSupervision(advantage_eps=0).per_token(batch)
    assert per_completion(result, [4, 2]) == [[1, 1, 1, 0], [-1, -1]]


def test_process_supervision_normalises_all_steps_of_the_group_together():
    # Not per completion: 4 steps of 0, 0, 1, 1 have std sqrt(1/3), so each is ∓0.866025. Summed from the back.
    steps = [[(0, 0.0), (1, 1.0)], [(0, 0.0), (1, 1.0)]]
    batch = batch_of([[0, 0]], [1], [0, 0], [2, 2], [steps])
    result = per_completion(ProcessSupervision(advantage_eps=0).per_token(batch), [2, 2])
    assert result[0] == result[1] == pytest.approx([0, math.sqrt(0.75)], abs=1e-7)


def test_a_reward_for_the_whole_is_one_step_at_the_last_token():
    # Steps normalised to -1, 0, 1, and the reward for the whole, 0 and 10, to ∓0.7071 with weight 2.
    steps = [[(0, 1.0), (1, 2.0)], [(0, 3.0)]]
    batch = batch_of([[0, 0], [0, 10]], [1, 2], [0, 0], [3, 2], [steps, None])
    result = per_completion(ProcessSupervision(advantage_eps=0).per_token(batch), [3, 2])
    whole = math.sqrt(2)
    assert result[0] == pytest.approx([-1 + 0 - whole, 0 - whole, -whole])
    assert result[1] == pytest.approx([1 + whole, whole])


def test_process_supervision_needs_segments():
    with pytest.raises(UsageError, match="no reward scores segments"):
        ProcessSupervision().per_token(batch_of([[0, 1]], [1], [0, 0], [2, 2]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_process_supervision_agrees_with_a_float64_loop(seed, std, ddof):
    rng = random.Random(seed)
    count, weights = rng.randrange(1, 12), [1.0, -0.5, 2.0]
    group = [rng.randrange(3) for _ in range(count)]
    lengths = [rng.randrange(1, 7) for _ in range(count)]

    def some_steps() -> list[list[tuple[int, float]]]:
        ends = [sorted(rng.sample(range(n), rng.randrange(0, min(n, 3) + 1))) for n in lengths]
        return [[(e, rng.choice([0.0, 1.0, rng.gauss(0, 2)])) for e in own] for own in ends]

    steps = [some_steps(), None, some_steps()]
    values = [[rng.gauss(0, 1) for _ in range(count)] for _ in weights]
    # A completion is left out where a reward failed, and where one of its steps is NaN.
    values[1] = [math.nan if rng.random() < 0.15 else value for value in values[1]]
    for row in range(count):
        if steps[2][row] and rng.random() < 0.15:
            steps[2][row][0] = (steps[2][row][0][0], math.nan)
    failed = [
        math.isnan(values[1][row]) or any(math.isnan(value) for _, value in steps[2][row]) for row in range(count)
    ]
    expected = [[0.0] * n for n in lengths]
    for k, weight in enumerate(weights):
        of_reward = steps[k] or [[(n - 1, value)] for n, value in zip(lengths, values[k], strict=True)]
        flat = [(row, *step) for row, own in enumerate(of_reward) if not failed[row] for step in own]
        normalised = float64_group_std([value for _, _, value in flat], [group[row] for row, _, _ in flat], ddof)
        for (row, end, _), value in zip(flat, normalised, strict=True):
            for t in range(end + 1):
                expected[row][t] += weight * value
    batch = batch_of(values, weights, group, lengths, steps)
    result = per_completion(ProcessSupervision(std=std).per_token(batch), lengths)
    for row in range(count):
        assert result[row] == pytest.approx(expected[row], rel=1e-5, abs=1e-5)
