"""CISPO: a bound on the weight of a token's gradient."""

from torch import Tensor

from grpo_lightning.maths.kl import log_ratio
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult, bounds, clip


class CISPO(Surrogate):
    """CISPO: sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * Â * log π_θ (arXiv 2506.13585, Eq. 4-5).

    Every token keeps a gradient: the bounds only limit its size. A clip silences rare but decisive tokens early.

    Args:
        clip_low: ε below; None, as in the paper, sets no bound.
        clip_high: ε above: the factor is at most 1 + clip_high. The paper gives no value; in ScaleRL (arXiv 2510.13786)
            the factor is at most 5.
    """

    def __init__(self, clip_low: float | None = None, clip_high: float | None = 4.0) -> None:
        self.low, self.high = bounds(clip_low, clip_high)

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        ratio = log_ratio(logp.detach(), old_logp).exp()
        result = clip(ratio, rollouts.advantage, self.low, self.high, highest=-old_logp)
        result.value = ratio.clamp(self.low, self.high) * rollouts.advantage * logp
        return result
