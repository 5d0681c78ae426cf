"""The GRPO objective as one weighted sum over tokens."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning.maths.corrections import Correction, NoCorrection
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.filters import TokenMask
from grpo_lightning.maths.kl import K3, KLEstimator, KLPenalty, log_ratio
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Clipped, Surrogate, SurrogateResult
from grpo_lightning.maths.weightings import BatchSize, SequenceMean, TokenWeighting
from grpo_lightning.types import at_least, require


@dataclass(slots=True)
class Terms:
    """What N tokens add to J, each before its weight."""

    surrogate: SurrogateResult  # the surrogate's values and bounds
    kl: Tensor  # [N] estimates of KL(π_θ || π_ref); 0 without a reference
    total: Tensor  # [N] surrogate - beta * kl + entropy_bonus * entropy, with gradient through log π_θ


@dataclass
class Objective:
    """J = sum_t weight_t * (surrogate_t - beta * kl_t + entropy_bonus * H_t), to be maximised (DeepSeekMath Eq. 3).

    Args:
        surrogate: The per-token objective from log π_θ, log π_old and Â.
        kl: Estimator of D_KL[π_θ || π_ref].
        beta: β, its coefficient. 0 means no KL term.
        weighting: How tokens are averaged.
        masks: Tokens to leave out.
        correction: A factor in the weight where sampler and policy differ: the engine rounds, or has older weights.
        entropy_bonus: Coefficient of the entropy of π_θ at each token, against collapse to few answers.
        reward_kl: A KL penalty in the reward, beside `beta` or instead of it.
    """

    surrogate: Surrogate = field(default_factory=Clipped)
    kl: KLEstimator = field(default_factory=K3)
    beta: float = 0.0
    weighting: TokenWeighting = field(default_factory=SequenceMean)
    masks: list[TokenMask] = field(default_factory=list)
    entropy_bonus: float = 0.0
    correction: Correction = field(default_factory=NoCorrection)
    reward_kl: KLPenalty | None = None

    def __post_init__(self) -> None:
        require(self.beta >= 0, f"objective.beta={self.beta}: give 0 (no KL term) or more; DeepSeekMath uses 0.04")
        at_least("objective.entropy_bonus", self.entropy_bonus, 0)

    @property
    def needs_reference(self) -> bool:
        """True if a KL term reads log π_ref."""
        return self.beta > 0 or self.reward_kl is not None

    @property
    def learns_from_advantage_alone(self) -> bool:
        """True if a token without advantage has no gradient."""
        return self.beta == self.entropy_bonus == 0 and self.surrogate.needs_advantage

    def token_weight(self, rollouts: Rollouts, batch: BatchSize) -> Tensor:
        """[N] float32: the weighting's weight of every token, 0 where a mask leaves the token out."""
        whole = self.weighting(rollouts.whole_lengths, rollouts.group[rollouts.begins], batch)
        weight = rollouts.spread(whole[rollouts.completion])
        for mask in self.masks:
            weight = torch.where(mask(rollouts), weight, 0.0)
        return weight

    def factor(self, old_logp: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] what the correction multiplies the weight by, from [N] log π_old; 1 where it reads nothing."""
        if not self.correction.reads_sampler:
            return torch.ones_like(old_logp)
        assert rollouts.sampler_logp is not None
        return self.correction(log_ratio(old_logp.detach(), rollouts.sampler_logp), rollouts)

    def terms(self, logp: Tensor, entropy: Tensor, rollouts: Rollouts) -> Terms:
        """What each token adds to J, before its weight; arguments as in `__call__`."""
        old_logp = logp.detach() if rollouts.old_logp is None else rollouts.old_logp
        surrogate = self.surrogate(logp, old_logp, rollouts)
        total, kl = surrogate.value, torch.zeros_like(old_logp)
        if rollouts.ref_logp is not None:
            kl = self.kl(logp, rollouts.ref_logp, old_logp)
        if self.beta > 0:
            assert rollouts.ref_logp is not None
            total = total - self.beta * kl
        if self.entropy_bonus > 0:
            total = total + self.entropy_bonus * entropy
        return Terms(surrogate, kl, total)

    def __call__(self, logp: Tensor, entropy: Tensor, rollouts: Rollouts) -> tuple[Tensor, Diagnostics]:
        """J with gradient, and diagnostics.

        Args:
            logp: [N] float32 log π_θ, with gradient.
            entropy: [N] float32 entropy of π_θ, with gradient if it earns a bonus.
            rollouts: The tokens.
        """
        assert logp.shape == rollouts.token_ids.shape and logp.dtype == torch.float32
        current = logp.detach()
        old_logp = current if rollouts.old_logp is None else rollouts.old_logp
        terms = self.terms(logp, entropy, rollouts)
        weight = rollouts.weight * self.factor(old_logp, rollouts)
        objective = (weight * terms.total).sum()
        return objective, Diagnostics.from_update(
            rollouts, weight, terms.surrogate, objective, entropy, terms.kl, log_ratio(current, old_logp)
        )
