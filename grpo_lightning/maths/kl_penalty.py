"""The KL penalty in the reward."""

from grpo_lightning.maths.kl import K1, KLEstimator
from grpo_lightning.types import UsageError


class KLPenalty:
    """KL in the reward: R(q, o) - beta * sum over t of kl_t, taken at π_old (DeepSeekMath Eq. 2, summed over tokens).

    As in RLHF: the penalty is one reward more, so the advantage compares and normalises it like the others. Together
    with `objective.beta` above 0 it is the dual penalty.

    Args:
        beta: Its coefficient, in units of reward per nat.
        kl: The estimator; k1 in RLHF's reward.
    """

    def __init__(self, beta: float = 0.04, kl: KLEstimator | None = None) -> None:
        if not beta > 0:
            raise UsageError(f"reward_kl.beta={beta}: give more than 0, or leave model.reward_kl out")
        self.beta = beta
        self.kl = kl or K1()
