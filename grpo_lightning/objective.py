"""The GRPO objective as one weighted sum over tokens, and what to watch while it is maximised."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from grpo_lightning.kl import K3, KLEstimator
from grpo_lightning.masks import TokenMask
from grpo_lightning.ragged import spread
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.surrogates import Clipped, Surrogate, log_ratio
from grpo_lightning.types import UsageError
from grpo_lightning.weightings import BatchSize, SequenceMean, TokenWeighting


@dataclass(slots=True)
class Diagnostics:
    """Sums over the tokens whose weight is not 0, so that micro-batches and ranks add up; `ratio_max` is a maximum."""

    tokens: Tensor
    pushing: Tensor
    unreachable: Tensor
    objective: Tensor
    entropy: Tensor
    ratio: Tensor
    kl_ref: Tensor
    kl_old: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    ratio_max: Tensor

    def __add__(self, other: "Diagnostics") -> "Diagnostics":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Diagnostics(**sums | {"ratio_max": torch.maximum(self.ratio_max, other.ratio_max)})

    def reduce(self, reduce: Callable[..., Tensor]) -> "Diagnostics":
        """Those of all ranks together; `reduce` is the strategy's, told `sum` or `max`."""
        names = [f.name for f in fields(self) if f.name != "ratio_max"]
        sums = reduce(torch.stack([getattr(self, name) for name in names]), reduce_op="sum")
        return Diagnostics(
            **dict(zip(names, sums, strict=True)), ratio_max=reduce(self.ratio_max.clone(), reduce_op="max")
        )


@dataclass
class Objective:
    """J = sum_t weight_t * (surrogate_t - beta * kl_t + entropy_bonus * H_t), to be maximised (DeepSeekMath Eq. 3).

    Args:
        surrogate: The per-token objective from log π_θ, log π_old and Â.
        kl: The estimator of D_KL[π_θ || π_ref].
        beta: β, its coefficient. 0 means no KL term.
        weighting: How tokens are averaged.
        masks: Tokens that are not learned from.
        entropy_bonus: Coefficient of the entropy of π_θ at each token. 0 means no such term.
    """

    surrogate: Surrogate = field(default_factory=Clipped)
    kl: KLEstimator = field(default_factory=K3)
    beta: float = 0.0
    weighting: TokenWeighting = field(default_factory=SequenceMean)
    masks: list[TokenMask] = field(default_factory=list)
    entropy_bonus: float = 0.0

    def __post_init__(self) -> None:
        if not self.beta >= 0:
            raise UsageError(f"objective.beta={self.beta}: give 0 (no KL term) or more; DeepSeekMath uses 0.04")
        if not self.entropy_bonus >= 0:
            raise UsageError(f"objective.entropy_bonus={self.entropy_bonus}: give 0 (no bonus) or more, e.g. 0.001")

    @property
    def learns_from_advantage_alone(self) -> bool:
        """Whether a token without advantage has no gradient."""
        return self.beta == self.entropy_bonus == 0

    def token_weight(self, rollouts: Rollouts, batch: BatchSize) -> Tensor:
        """[N] float32: the weighting's weight of every token, 0 where a mask leaves the token out."""
        weight = spread(self.weighting(rollouts.lengths, rollouts.group, batch), rollouts.lengths)
        for mask in self.masks:
            weight = torch.where(mask(rollouts), weight, 0.0)
        return weight

    def __call__(self, logp: Tensor, entropy: Tensor, rollouts: Rollouts) -> tuple[Tensor, Diagnostics]:
        """[N] log π_θ with gradient, [N] entropy, with gradient if it earns a bonus -> J, diagnostics."""
        assert logp.shape == rollouts.token_ids.shape and logp.dtype == torch.float32
        current = logp.detach()
        old_logp = current if rollouts.old_logp is None else rollouts.old_logp
        surrogate = self.surrogate(logp, old_logp, rollouts)
        per_token = surrogate.value
        kl_ref = torch.zeros_like(current)
        if rollouts.ref_logp is not None:
            kl_ref = self.kl(logp, rollouts.ref_logp, old_logp)
        if self.beta > 0:
            assert rollouts.ref_logp is not None
            per_token = per_token - self.beta * kl_ref
        if self.entropy_bonus > 0:
            per_token = per_token + self.entropy_bonus * entropy
        objective = (rollouts.weight * per_token).sum()

        counts = rollouts.weight != 0
        pushing = counts & (rollouts.advantage != 0)
        difference = log_ratio(current, old_logp)
        ratio = difference.exp()

        def total(values: Tensor, where: Tensor = counts) -> Tensor:
            return torch.where(where, values.detach(), 0.0).sum()

        diagnostics = Diagnostics(
            tokens=counts.sum().float(),
            pushing=pushing.sum().float(),
            unreachable=total(surrogate.unreachable, pushing),
            objective=objective.detach(),
            entropy=total(entropy),
            ratio=total(ratio),
            kl_ref=total(kl_ref),
            # k3 of KL(old || new): the tokens were drawn from π_old, so here the estimate is unbiased.
            kl_old=total(difference.expm1() - difference),
            clipped_low=total(surrogate.clipped_low, pushing),
            clipped_high=total(surrogate.clipped_high, pushing),
            ratio_max=torch.where(counts, ratio, 0.0).max(),
        )
        return objective, diagnostics
