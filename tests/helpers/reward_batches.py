"""Rewards of a few completions, by hand and in Python floats."""

import math

import torch

from grpo_lightning.maths.advantages import AdvantageEstimator
from grpo_lightning.maths.reward_batch import RewardBatch, SegmentRewards


def members_of(values: list[float], group: list[int], own: int) -> list[float]:
    return [v for v, g in zip(values, group, strict=True) if g == own and not math.isnan(v)]


def deviations(values: list[float], group: list[int]) -> list[float]:
    """r_i less the mean of its group, and NaN where it is NaN."""
    means = {g: math.fsum(m) / len(m) for g in set(group) if (m := members_of(values, group, g))}
    return [v - means[g] if not math.isnan(v) else v for v, g in zip(values, group, strict=True)]


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


def of(estimator: AdvantageEstimator, rewards: list[float], group: list[int] | None = None) -> list[float]:
    """The advantages of one reward per completion, all of one group unless said otherwise."""
    reward = torch.tensor(rewards, dtype=torch.float64)
    return estimator(reward, torch.tensor(group or [0] * len(rewards))).tolist()
