"""KL estimators: D_KL[π_θ || π_ref] per token, from the log-probs of the drawn token. docs/kl.md compares them."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from grpo_lightning.maths.ragged import segment_sum, segments
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import require

MAX_LOG_RATIO = 20.0  # a ratio of e^20 has no use, and far beyond it exp overflows
ROUNDING = 1e-5
"""Nats per token by which two passes over the same tokens may differ in float32. A sampler's log-probs are one pass."""


def log_ratio(logp: Tensor, base_logp: Tensor) -> Tensor:
    """[N] log(π/π_base) from [N] log π and log π_base, clamped to ±MAX_LOG_RATIO."""
    return (logp - base_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class KLEstimator(ABC):
    """A per-token estimate of the reverse KL divergence. Gradient flows through `logp` alone."""

    reads_distributions: bool = False
    """True if it compares whole distributions, which `reading` reads in the update: no log π_ref is needed for it."""

    def reading(self, reference: Any, policy: Any, rollouts: Any) -> Any:
        """What `Policy.forward` shall read to find the [N] divergences; None if log-probs of drawn tokens do."""

    @abstractmethod
    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        """[N] estimates from [N] log π_θ, log π_ref and log π_old; the tokens were drawn from π_old."""


class K1(KLEstimator):
    """k1 = log(π_θ/π_ref) (Schulman 2020).

    For the reward (`model.objective.reward_kl`): unbiased, though of high variance, and negative where π_ref is larger.
    In the objective it does nothing: its gradient is that of log π_θ, 0 on average.
    """

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        return logp - ref_logp


class K2(KLEstimator):
    """k2 = log(π_θ/π_ref)² / 2 (Schulman 2020).

    For the objective: on policy, its average gradient is exactly that of the reverse KL. Its value is biased.
    """

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        return log_ratio(logp, ref_logp).square() / 2


class K3(KLEstimator):
    """k3 = π_ref/π_θ - log(π_ref/π_θ) - 1 (Schulman 2020; DeepSeekMath Eq. 4).

    DeepSeekMath's choice, and a good one to watch: unbiased, of low variance, never negative, 0 where the two agree.
    Its average gradient is that of the forward KL.
    """

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        # Capped where exp would overflow. Not capped below: a token far above π_ref keeps its gradient, 1.
        difference = (ref_logp - logp).clamp(max=MAX_LOG_RATIO)
        # Near 0 the value is difference²/2, which exp(difference) - difference - 1 would lose in rounding.
        return difference.expm1() - difference


class KLPenalty:
    """KL in the reward: R(q, o) - beta * sum over t of kl_t, taken at π_old (DeepSeekMath Eq. 2, summed over tokens).

    As in RLHF: the penalty is one reward more, so the advantage compares and normalises it like the others. Together
    with `objective.beta` above 0 it is the dual penalty. KLs of a group that differ by float32's rounding alone count
    as equal, or an advantage divided by their deviation would be noise.

    Args:
        beta: Its coefficient, in units of reward per nat.
        kl: The estimator; k1 in RLHF's reward.
    """

    def __init__(self, beta: float = 0.04, kl: KLEstimator | None = None) -> None:
        require(beta > 0, f"reward_kl.beta={beta}: give more than 0, or leave model.objective.reward_kl out")
        self.beta, self.kl = beta, kl or K1()
        blind = f"reward_kl.kl={type(self.kl).__name__}: it is the same whichever token is drawn, so it teaches nothing"
        require(not self.kl.reads_distributions, f"{blind}. Give it as model.objective.kl, or K1 here")

    def __call__(self, rewards: RewardBatch, rollouts: Rollouts) -> RewardBatch:
        """The rewards of this rank's rollouts, and the penalty as one more."""
        assert rollouts.old_logp is not None and rollouts.ref_logp is not None
        per_token = self.kl(rollouts.old_logp, rollouts.ref_logp, rollouts.old_logp).double()
        per_completion = segment_sum(per_token, segments(rewards.lengths), len(rewards.lengths))
        return rewards.plus(without_rounding(per_completion, rewards.group, ROUNDING * rewards.lengths), -self.beta)


def without_rounding(value: Tensor, group: Tensor, rounding: Tensor) -> Tensor:
    """[B] the values, equal in a group whose values differ by at most the largest of their [B] roundings."""
    value = value.clone()
    for index in group.unique():
        rows = group == index
        smallest = value[rows].min()
        if value[rows].max() - smallest <= rounding[rows].max():
            value[rows] = smallest
    return value
