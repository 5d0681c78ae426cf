"""KL estimators: D_KL[π_θ || π_ref] per token, from log-probs of the sampled token.

docs/explanation/kl.md compares them.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from grpo_lightning.maths.ragged import segment_sum, segments
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import UsageError, require

MAX_LOG_RATIO = 20.0
"""Largest log-ratio: a ratio of e^20 has no use, and far beyond it exp overflows."""
ROUNDING = 1e-5
"""Nats per token by which the log-probs of two forwards, or of a sampler and a forward, may differ in float32."""


def log_ratio(logp: Tensor, base_logp: Tensor) -> Tensor:
    """[N] log(π/π_base) from [N] log π and log π_base, clamped to ±MAX_LOG_RATIO."""
    return (logp - base_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class KLEstimator(ABC):
    """Estimates the reverse KL divergence per token. Gradient flows only through `logp`."""

    reads_distributions: bool = False
    """True if it compares whole distributions in the update (see `reading`), and so needs no log π_ref per token."""

    def reading(self, reference: Any, policy: Any, rollouts: Any) -> Any:
        """Returns a function that computes [N] divergences from hidden states inside `Policy.forward`.

        None, the default, if log-probs of the sampled tokens are enough.
        """

    @abstractmethod
    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        """[N] estimates from [N] log π_θ, log π_ref and log π_old; the tokens were sampled from π_old."""


class K1(KLEstimator):
    """k1 = log(π_θ/π_ref) (Schulman 2020).

    For the reward (`model.objective.reward_kl`): unbiased, though of high variance, and negative where π_ref is larger.
    In the objective it has no effect: its gradient is the gradient of log π_θ, 0 on average.
    """

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        return logp - ref_logp


class K2(KLEstimator):
    """k2 = log(π_θ/π_ref)² / 2 (Schulman 2020).

    For the objective: on policy, its average gradient is exactly the gradient of the reverse KL. Its value is biased.
    """

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        return log_ratio(logp, ref_logp).square() / 2


class K3(KLEstimator):
    """k3 = π_ref/π_θ - log(π_ref/π_θ) - 1 (Schulman 2020; DeepSeekMath Eq. 4).

    DeepSeekMath's choice, and good to watch: unbiased, of low variance, never negative, 0 where π_θ and π_ref agree.
    Its average gradient is the gradient of the forward KL.
    """

    def __call__(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        # Capped where exp would overflow. Not capped below: a token far above π_ref keeps its gradient, 1.
        difference = (ref_logp - logp).clamp(max=MAX_LOG_RATIO)
        # Near 0 the value is difference²/2, which exp(difference) - difference - 1 would lose in rounding.
        return difference.expm1() - difference


class KLPenalty:
    """Subtracts KL from the reward: R(q, o) - beta * sum over t of kl_t at π_old (DeepSeekMath Eq. 2, over all tokens).

    As in RLHF, the penalty is a further reward, which the advantage compares and normalises like other rewards.
    Together with `objective.beta` above 0 it is the dual penalty. KLs in a group that differ only by float32's rounding
    count as equal: an advantage divided by their deviation would be noise.

    Args:
        beta: Coefficient of the penalty, in units of reward per nat.
        kl: The estimator; k1 in RLHF's reward.
    """

    def __init__(self, beta: float = 0.04, kl: KLEstimator | None = None) -> None:
        require(beta > 0, f"reward_kl.beta={beta}: give more than 0, or leave model.objective.reward_kl out")
        self.beta = beta
        self.kl = kl or K1()
        if self.kl.reads_distributions:
            raise UsageError(
                f"reward_kl.kl={type(self.kl).__name__}: it is the same whichever token is drawn, "
                "so it teaches nothing. Give it as model.objective.kl, or K1 here"
            )

    def __call__(self, rewards: RewardBatch, rollouts: Rollouts) -> RewardBatch:
        """Returns the rewards of this rank's rollouts with the penalty as a further reward."""
        assert rollouts.old_logp is not None and rollouts.ref_logp is not None
        per_token = self.kl(rollouts.old_logp, rollouts.ref_logp, rollouts.old_logp).double()
        per_completion = segment_sum(per_token, segments(rewards.lengths), len(rewards.lengths))
        return rewards.plus(without_rounding(per_completion, rewards.group, ROUNDING * rewards.lengths), -self.beta)


def without_rounding(value: Tensor, group: Tensor, rounding: Tensor) -> Tensor:
    """[B] values, made equal in each group whose values differ by at most the largest of their [B] roundings."""
    value = value.clone()
    for index in group.unique():
        rows = group == index
        smallest = value[rows].min()
        if value[rows].max() - smallest <= rounding[rows].max():
            value[rows] = smallest
    return value
