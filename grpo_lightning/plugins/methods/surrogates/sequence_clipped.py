"""GSPO: the ratio of a sequence."""

from torch import Tensor

from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.ragged import segment_mean
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult, bounds, clip


class SequenceClipped(Surrogate):
    """GSPO: `Clipped` with the ratio of the sequence, s_i = exp(mean over t of log(π_θ/π_old)), for all its tokens.

    For long completions and mixtures of experts, where the ratios of single tokens are noisy. With the weighting
    `SequenceMean` this is arXiv 2507.18071, Eq. 5-7.

    Args:
        clip_low: ε below; s_i moves little, so it is small in the paper. None sets no bound.
        clip_high: ε above. None sets no bound.
    """

    def __init__(self, clip_low: float | None = 3e-4, clip_high: float | None = 4e-4) -> None:
        self.low, self.high = bounds(clip_low, clip_high)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        highest = rollouts.per_token(segment_mean(-old_logp, rollouts.lengths))
        return clip(self.ratio(logp, old_logp, rollouts), rollouts.advantage, self.low, self.high, highest)

    def ratio(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] float32, s_i for each token of completion i."""
        return rollouts.per_token(segment_mean(log_ratio(logp, old_logp), rollouts.lengths).exp())
