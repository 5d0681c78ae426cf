"""The off-policy sequence masking of DeepSeek-V3.2."""

import torch
from torch import Tensor

from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.ragged import segment_mean
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Clipped, Surrogate, SurrogateResult
from grpo_lightning.types import at_least


class OffPolicyMask(Surrogate):
    """Leaves out bad completions that the policy has moved away from: mean over t of log(π_old/π_θ) above `threshold`.

    For many updates per step: lowering the probability of text that the policy no longer writes only makes training
    unstable. This is the off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556, Sec. 3.1); the KL term stays.

    Args:
        surrogate: The per-token objective of the other completions; by default `Clipped`.
        threshold: δ, in nats per token.
    """

    def __init__(self, surrogate: Surrogate | None = None, threshold: float = 0.1) -> None:
        at_least("threshold", threshold, 0, "OffPolicyMask")
        self.surrogate = surrogate or Clipped()
        self.threshold = threshold
        self.reads_old_logp = self.surrogate.reads_old_logp
        self.moves_without_advantage = self.surrogate.moves_without_advantage

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        return self.surrogate.prepare(rollouts)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        result = self.surrogate(logp, old_logp, rollouts)
        distance = rollouts.per_token(segment_mean(log_ratio(old_logp, logp.detach()), rollouts.lengths))
        is_masked = (distance > self.threshold) & (rollouts.advantage < 0)
        result.value = torch.where(is_masked, 0.0, result.value)
        # Not in place: a surrogate without bounds returns one tensor for all three flags.
        result.clipped_low = result.clipped_low | is_masked
        result.clipped_high = result.clipped_high & ~is_masked
        return result
