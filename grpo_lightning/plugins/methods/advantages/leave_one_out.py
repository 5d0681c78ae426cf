"""RLOO: the baseline is the mean of the other completions."""

from torch import Tensor

from grpo_lightning.maths.advantages import AdvantageEstimator, centred


class LeaveOneOut(AdvantageEstimator):
    """RLOO: Â_i = r_i - mean of the others' r_j, which is G/(G-1) (r_i - mean(r)) (arXiv 2402.14740, Sec. 2.2).

    The baseline does not depend on the completion itself, so the gradient is unbiased. A single completion gets 0.
    """

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        deviation, count = centred(reward, group, num_groups)
        return deviation * (count / (count - 1).clamp(min=1))[group]
