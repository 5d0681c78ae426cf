"""The control of distillation: it only suppresses what the teacher finds unlikely."""

from torch import Tensor

from grpo_lightning import AdvantageEstimator
from grpo_lightning.maths.reward_batch import RewardBatch


class Suppression(AdvantageEstimator):
    """-1 for a token that the teacher finds less likely than the policy did by more than `gap` nats, 0 for the others.

    It takes from the teacher which tokens are bad, and neither how bad they are nor which are good.
    """

    compares_group = False
    reads = ("old_logp", "ref_logp")

    def __init__(self, gap: float = 0.1) -> None:
        self.gap = gap

    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        return reward * 0

    def per_token(self, rewards: RewardBatch) -> Tensor:
        return -((rewards.columns["old_logp"] - rewards.columns["ref_logp"]) > self.gap).float()
