"""The GRPO objective as one weighted sum over tokens, and what to watch while it is maximised."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from grpo_lightning.kl import K3, KLEstimator
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.surrogates import Clipped, Surrogate, log_ratio
from grpo_lightning.types import UsageError
from grpo_lightning.weightings import SequenceMean, TokenWeighting


@dataclass(slots=True)
class Diagnostics:
    """Sums over tokens, so that those of micro-batches and ranks add up; `ratio_max` alone is a maximum."""

    tokens: Tensor
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
    """J = sum_t weight_t * (surrogate_t - beta * kl_t), to be maximised (DeepSeekMath Eq. 3).

    Args:
        surrogate: The per-token objective from log π_θ, log π_old and Â.
        kl: The estimator of D_KL[π_θ || π_ref].
        beta: β, its coefficient. 0 means that no reference model exists at all.
        weighting: How tokens are averaged.
    """

    surrogate: Surrogate = field(default_factory=Clipped)
    kl: KLEstimator = field(default_factory=K3)
    beta: float = 0.0
    weighting: TokenWeighting = field(default_factory=SequenceMean)

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise UsageError(f"objective.beta={self.beta}: give 0 (no KL term) or more; DeepSeekMath uses 0.04")

    def __call__(self, logp: Tensor, entropy: Tensor, rollouts: Rollouts) -> tuple[Tensor, Diagnostics]:
        """[N] log π_θ with gradient, [N] entropy (only watched) -> J of these rollouts and the diagnostics."""
        assert logp.shape == rollouts.token_ids.shape and logp.dtype == torch.float32
        current = logp.detach()
        old_logp = current if rollouts.old_logp is None else rollouts.old_logp
        surrogate = self.surrogate(logp, old_logp, rollouts)
        per_token = surrogate.value
        kl_ref = torch.zeros_like(current)
        if self.beta > 0:
            assert rollouts.ref_logp is not None
            kl_ref = self.kl(logp, rollouts.ref_logp)
            per_token = per_token - self.beta * kl_ref
        objective = (rollouts.weight * per_token).sum()

        difference = log_ratio(current, old_logp)
        ratio = difference.exp()
        diagnostics = Diagnostics(
            tokens=ratio.new_tensor(len(ratio)),
            objective=objective.detach(),
            entropy=entropy.sum(),
            ratio=ratio.sum(),
            kl_ref=kl_ref.detach().sum(),
            # k3 of KL(old || new): the tokens were drawn from π_old, so here the estimate is unbiased.
            kl_old=(difference.expm1() - difference).sum(),
            clipped_low=surrogate.clipped_low.sum().float(),
            clipped_high=surrogate.clipped_high.sum().float(),
            ratio_max=ratio.max(),
        )
        return objective, diagnostics
