"""Advantages: how much better a completion is than its group or its batch."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import per_element, segment_sum
from grpo_lightning.maths.reward_batch import EQUAL, RewardBatch
from grpo_lightning.types import Stateful, at_least

ROUNDING = 1e-6
"""A deviation of at most this fraction of the largest deviation in its group is rounding."""


class AdvantageEstimator(Stateful, ABC):
    """Computes advantages Â from rewards.

    A sample whose reward failed (NaN) gets 0, and does not count in its group's mean and deviation.
    """

    compares_group: ClassVar[bool] = True
    """True if Â compares the completions of one prompt, so that with G = 1 every advantage would be 0."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of the log-probs that `per_token` reads from `RewardBatch.columns`: `old_logp`, `ref_logp`."""

    @abstractmethod
    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """[B] float64 advantages from [B] float64 rewards without NaN and [B] int64 groups. Groups may be empty."""

    def __call__(self, reward: Tensor, group: Tensor) -> Tensor:
        """[B] float32 advantages from [B] rewards of the whole step on all ranks, and [B] int64 groups."""
        assert reward.ndim == 1 and reward.shape == group.shape
        advantage = torch.zeros(len(reward), dtype=torch.float64, device=reward.device)
        valid = ~reward.isnan()
        if valid.any():
            advantage[valid] = self.estimate(reward[valid].double(), group[valid], int(group.max()) + 1)
        return advantage.float()

    def per_token(self, rewards: RewardBatch) -> Tensor:
        """[N] float32 advantages. By default each token gets the advantage of its completion."""
        return per_element(self(rewards.total, rewards.group), rewards.lengths)


class GroupStd(AdvantageEstimator):
    """GRPO: Â_i = (r_i - mean(r)) / (std(r) + advantage_eps) over the group (DeepSeekMath 4.1.2; CS336 Eq. 28).

    Every prompt has about the same effect, whatever the scale of its rewards. A group whose rewards are all equal gets
    exactly 0, and so does a group of one completion.

    Args:
        advantage_eps: Added to the standard deviation.
        std: `sample`, as in TRL, divides the squared deviations by G - 1, `population` by G. The paper does not say.
    """

    def __init__(self, advantage_eps: float = 1e-6, std: Literal["population", "sample"] = "sample") -> None:
        at_least("advantage_eps", advantage_eps, 0, type(self).__name__)
        self.advantage_eps = advantage_eps
        self.std = std

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        deviation, count = centred(reward, group, num_groups)
        divisor = count if self.std == "population" else (count - 1).clamp(min=1)
        std = (segment_sum(deviation.square(), group, num_groups) / divisor).sqrt()
        return quotient(deviation, (std + self.advantage_eps)[group])


class GroupMean(AdvantageEstimator):
    """Dr. GRPO: Â_i = r_i - mean(r) over the group, without a division (arXiv 2503.20783, Sec. 3.2).

    Dividing by the standard deviation would weigh up prompts that are almost always or almost never solved.
    """

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return centred(reward, group, num_groups)[0]


class NoBaseline(AdvantageEstimator):
    """REINFORCE: Â_i = r_i (Williams 1992).

    It works with one completion per prompt; its variance is high.
    """

    compares_group = False

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return reward


def centred(reward: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """[B] rewards minus their group's mean, exactly 0 in a group without spread, and [num_groups] sizes of groups."""
    count = segment_sum(torch.ones_like(reward), group, num_groups)
    mean = segment_sum(reward, group, num_groups) / count.clamp(min=1)
    return torch.where(has_spread(reward, group, num_groups)[group], reward - mean[group], 0.0), count


def quotient(deviation: Tensor, scale: Tensor) -> Tensor:
    """[B] deviations divided by the scale; 0 where the deviation is 0, even if the scale is 0 too."""
    return torch.where(deviation == 0, 0.0, deviation / scale)


def has_spread(reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """[num_groups] bool, True if the group's rewards differ by more than rounding; NaN rewards do not count."""
    valid = ~reward.isnan()
    reward, group = reward[valid], group[valid]
    smallest = reward.new_full((num_groups,), torch.inf).scatter_reduce(0, group, reward, "amin")
    largest = reward.new_full((num_groups,), -torch.inf).scatter_reduce(0, group, reward, "amax")
    return largest - smallest > EQUAL * torch.maximum(largest.abs(), smallest.abs())
