"""The GRPO objective as one weighted sum over tokens."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.maths.corrections import Correction, NoCorrection
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.entropy import EntropyBonus, NoEntropy
from grpo_lightning.maths.filters import TokenMask, mask_factor
from grpo_lightning.maths.kl import K3, KLEstimator, KLPenalty, log_ratio
from grpo_lightning.maths.ragged import segment_sum
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Clipped, Surrogate, SurrogateResult
from grpo_lightning.maths.weightings import BatchSize, SequenceMean, TokenWeighting
from grpo_lightning.types import require


@dataclass(slots=True)
class Terms:
    """The terms of N tokens in J, before their weights."""

    old_logp: Tensor
    """[N] float32 log π_old; log π_θ, without gradient, while π_old is π_θ."""
    surrogate: SurrogateResult
    """The values of the surrogate, and which tokens are at a bound."""
    kl: Tensor
    """[N] estimates of KL(π_θ || π_ref); 0 without a reference."""
    total: Tensor
    """[N] surrogate - beta * kl + c * entropy, with gradient through log π_θ."""


@dataclass
class Objective:
    """J = sum_t weight_t * (surrogate_t - beta * kl_t + c * H_t), to be maximised (DeepSeekMath Eq. 3).

    Args:
        surrogate: The per-token objective from log π_θ, log π_old and Â.
        kl: Estimator of D_KL[π_θ || π_ref].
        beta: β, coefficient of the KL term. 0 means no KL term.
        weighting: The average over tokens.
        denominator: Tokens that `weighting` counts: `sampled`, all tokens; `kept`, tokens that the masks keep;
            `has_advantage`, kept tokens of groups that have an advantage.
        masks: Tokens to leave out, or factors of their weights.
        correction: A factor in the weight where sampler and policy differ: the engine rounds, or has older weights.
        entropy: c, the coefficient of the entropy H of π_θ at each token, against a collapse to few answers.
        reward_kl: A KL penalty in the reward, beside `beta` or instead of it.
    """

    surrogate: Surrogate = field(default_factory=Clipped)
    """The per-token objective from log π_θ, log π_old and Â."""
    kl: KLEstimator = field(default_factory=K3)
    """Estimator of D_KL[π_θ || π_ref]."""
    beta: float = 0.0
    """β, coefficient of the KL term; 0 means no KL term."""
    weighting: TokenWeighting = field(default_factory=SequenceMean)
    """The average over tokens."""
    masks: list[TokenMask] = field(default_factory=list)
    """Tokens to leave out, or factors of their weights."""
    entropy: EntropyBonus = field(default_factory=NoEntropy)
    """Gives c, the coefficient of the entropy of π_θ; some change it from update to update."""
    correction: Correction = field(default_factory=NoCorrection)
    """A factor in the weight where sampler and policy differ."""
    reward_kl: KLPenalty | None = None
    """A KL penalty in the reward; None: there is none."""
    denominator: Literal["sampled", "kept", "has_advantage"] = "sampled"
    """Tokens that `weighting` counts."""

    def __post_init__(self) -> None:
        require(self.beta >= 0, f"objective.beta={self.beta}: give 0 (no KL term) or more; DeepSeekMath uses 0.04")

    @property
    def needs_reference(self) -> bool:
        """True if a KL term reads log π_ref."""
        return self.beta > 0 or self.reward_kl is not None

    @property
    def learns_from_advantage_alone(self) -> bool:
        """True if a token without advantage has no gradient."""
        return self.beta == 0 and isinstance(self.entropy, NoEntropy) and not self.surrogate.moves_without_advantage

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Computes the columns that surrogate and correction read in the updates, such as ratios of whole completions.

        By default there are none. Every rank must call it.
        """
        return self.surrogate.prepare(rollouts) | self.correction.prepare(rollouts)

    def counted(self, rollouts: Rollouts) -> Tensor:
        """[N] bool, True for tokens that count in the denominators of the weighting; see `denominator`."""
        if self.denominator == "sampled":
            return torch.ones_like(rollouts.weight, dtype=torch.bool)
        is_kept = mask_factor(self.masks, rollouts) != 0
        if self.denominator == "kept":
            return is_kept
        # `segment_sum` adds up |Â| over the tokens of each group: the sum is 0 if the group has no advantage.
        group = rollouts.per_token(rollouts.group)
        advantage_of_group = segment_sum(rollouts.advantage.abs(), group, len(rollouts.prompt_lengths))
        return is_kept & (advantage_of_group[group] > 0)

    def token_weight(self, rollouts: Rollouts, batch: BatchSize) -> Tensor:
        """[N] float32 weights of the tokens: the weighting's weight, multiplied by the factors of the masks."""
        return self.weighting.per_token(rollouts, self.counted(rollouts), batch) * mask_factor(self.masks, rollouts)

    def factor(self, old_logp: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] float32 factors of the correction, from [N] log π_old; 1 without a correction."""
        if not self.correction.reads_sampler:
            return torch.ones_like(old_logp)
        assert rollouts.sampler_logp is not None
        return self.correction(log_ratio(old_logp.detach(), rollouts.sampler_logp), rollouts)

    def terms(self, logp: Tensor, entropy: Tensor, rollouts: Rollouts, divergence: Tensor | None = None) -> Terms:
        """Computes the terms of each token in J, before their weights; arguments as in `__call__`."""
        old_logp = logp.detach() if rollouts.old_logp is None else rollouts.old_logp
        surrogate = self.surrogate(logp, old_logp, rollouts)
        if divergence is not None:
            kl = divergence
        elif rollouts.ref_logp is not None:
            kl = self.kl(logp, rollouts.ref_logp, old_logp)
        else:
            kl = torch.zeros_like(old_logp)
        total = surrogate.value
        if self.beta > 0:
            assert divergence is not None or rollouts.ref_logp is not None
            total = total - self.beta * kl
        if self.entropy.coefficient > 0:
            total = total + self.entropy.coefficient * entropy
        return Terms(old_logp, surrogate, kl, total)

    def __call__(
        self, logp: Tensor, entropy: Tensor, rollouts: Rollouts, divergence: Tensor | None = None
    ) -> tuple[Tensor, Diagnostics]:
        """Computes J with gradient, and its diagnostics.

        Args:
            logp: [N] float32 log π_θ, with gradient.
            entropy: [N] float32 entropy of π_θ, with gradient if it earns a bonus.
            rollouts: The rollouts of the tokens, with the columns that the objective reads.
            divergence: [N] float32 D(π_θ, π_ref) with gradient, where the forward computed it from whole distributions.
                None: `kl` estimates it from log-probs.
        """
        assert logp.shape == rollouts.token_ids.shape and logp.dtype == torch.float32
        terms = self.terms(logp, entropy, rollouts, divergence)
        weight = rollouts.weight * self.factor(terms.old_logp, rollouts)
        objective = (weight * terms.total).sum()
        log_ratio_to_old = log_ratio(logp.detach(), terms.old_logp)
        return objective, Diagnostics.from_update(
            rollouts, weight, terms.surrogate, objective, entropy, terms.kl, log_ratio_to_old
        )
