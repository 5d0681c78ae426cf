"""Surrogates that look at whole completions: the ratio of the sequence instead of each token's."""

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import segment_mean
from grpo_lightning.maths.ratio import log_ratio
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Clipped, Surrogate, SurrogateResult, bounds, clip
from grpo_lightning.types import UsageError, at_least


class SequenceClipped(Surrogate):
    """GSPO: `Clipped` with the ratio of the sequence, s_i = exp(mean over t of log(π_θ/π_old)), for each of its tokens.

    For long completions and mixtures of experts, where the ratios of single tokens are noisy. With the weighting
    `SequenceMean` this is arXiv 2507.18071, Eq. 5-7.

    Args:
        clip_low: ε below; s_i moves little, so the paper's is small. None sets no bound.
        clip_high: ε above. None sets no bound.
    """

    def __init__(self, clip_low: float | None = 3e-4, clip_high: float | None = 4e-4) -> None:
        self.low, self.high = bounds(clip_low, clip_high)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] the clipped objective with the ratio of the sequence."""
        ratio = rollouts.spread(segment_mean(log_ratio(logp, old_logp), rollouts.lengths).exp())
        return self._clip(ratio, logp, old_logp, rollouts)

    def _clip(self, ratio: Tensor, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        highest = rollouts.spread(segment_mean(-old_logp, rollouts.lengths))
        return clip(ratio, rollouts.advantage, self.low, self.high, highest)


class SequenceClippedToken(SequenceClipped):
    """GSPO-token: the ratio has the value of the sequence's and the gradient of each token's own.

    For advantages that differ by token, as with process supervision. s_it = sg(s_i) π_θ / sg(π_θ)
    (arXiv 2507.18071, Eq. 13-14). Where Â is the same for all tokens, the gradient is that of GSPO.

    Args:
        clip_low: As in `SequenceClipped`.
        clip_high: As in `SequenceClipped`.
    """

    def _clip(self, ratio: Tensor, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        return super()._clip(ratio.detach() * (logp - logp.detach()).exp(), logp, old_logp, rollouts)


class GMPO(Surrogate):
    """GMPO: Â times the geometric mean of the sequence's clipped ratios (arXiv 2507.20673, Eq. 3-4).

    A geometric mean is less moved by single extreme ratios, so wider bounds are safe. The value is
    exp(mean over t of min(log ratio, clip(log ratio))) for good tokens; for bad ones max replaces min.

    Args:
        log_clip: The log-ratios are clipped to ± this; the paper takes 0.4, ratios from 0.67 to 1.49.
    """

    def __init__(self, log_clip: float = 0.4) -> None:
        if not log_clip > 0:
            raise UsageError(f"log_clip={log_clip}: give more than 0; the paper takes 0.4")
        self.log_clip = log_clip

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] Â times the geometric mean of clipped ratios."""
        advantage, lengths = rollouts.advantage, rollouts.lengths
        change = log_ratio(logp, old_logp)
        good, bad = (
            rollouts.spread(segment_mean(bounded, lengths).exp())
            for bounded in (change.clamp(max=self.log_clip), change.clamp(min=-self.log_clip))
        )
        return SurrogateResult(
            value=torch.where(advantage > 0, good, bad) * advantage,
            clipped_low=(change < -self.log_clip) & (advantage < 0),
            clipped_high=(change > self.log_clip) & (advantage > 0),
            unreachable=(-old_logp < self.log_clip) & (advantage > 0),
        )


class OffPolicyMask(Surrogate):
    """Leaves out bad completions that the policy has moved away from: mean over t of log(π_old/π_θ) above `threshold`.

    For many updates per step: pushing down what the policy no longer writes only unsettles it. This is the off-policy
    sequence masking of DeepSeek-V3.2 (arXiv 2512.02556, Sec. 3.1); the KL term stays.

    Args:
        surrogate: The per-token objective of the other completions; by default `Clipped`.
        threshold: δ, in nats per token.
    """

    def __init__(self, surrogate: Surrogate | None = None, threshold: float = 0.1) -> None:
        at_least("threshold", threshold, 0, "OffPolicyMask")
        self.surrogate = surrogate or Clipped()
        self.threshold = threshold
        self.reads_old_logp = self.surrogate.reads_old_logp

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """The columns of the other surrogate."""
        return self.surrogate.prepare(rollouts)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] values of the other surrogate, 0 for bad completions too far away."""
        result = self.surrogate(logp, old_logp, rollouts)
        away = rollouts.spread(segment_mean(log_ratio(old_logp, logp.detach()), rollouts.lengths))
        masked = (away > self.threshold) & (rollouts.advantage < 0)
        result.value = torch.where(masked, 0.0, result.value)
        # Not in place: a surrogate without bounds gives the same tensor for all three.
        result.clipped_low = result.clipped_low | masked
        result.clipped_high = result.clipped_high & ~masked
        return result
