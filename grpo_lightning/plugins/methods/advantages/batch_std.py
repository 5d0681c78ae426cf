"""REINFORCE++: differences from the group's mean, divided by the deviation over the batch."""

from torch import Tensor

from grpo_lightning.maths.advantages import AdvantageEstimator, centred, quotient
from grpo_lightning.types import at_least


class BatchStd(AdvantageEstimator):
    """REINFORCE++ with baseline: Â_i = (r_i - mean(r) of the group) / (std of these differences over the batch + eps).

    The scale is normalised, but easy and hard prompts keep their proportion. The batch is the exploration step on all
    ranks, over which the differences have mean 0 (arXiv 2501.03262, Sec. 3).

    Args:
        advantage_eps: Added to the population standard deviation.
    """

    def __init__(self, advantage_eps: float = 1e-6) -> None:
        at_least("advantage_eps", advantage_eps, 0, type(self).__name__)
        self.advantage_eps = advantage_eps

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return over_batch(centred(reward, group, num_groups)[0], self.advantage_eps)


def over_batch(deviation: Tensor, advantage_eps: float) -> Tensor:
    """[B] deviations, of mean 0 over the batch, divided by their population standard deviation."""
    return quotient(deviation, deviation.square().mean().sqrt() + advantage_eps)
