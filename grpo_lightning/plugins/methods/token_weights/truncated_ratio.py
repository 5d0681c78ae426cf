"""Truncated importance sampling."""

from torch import Tensor

from grpo_lightning.maths.corrections import Correction
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.types import at_least


class TruncatedRatio(Correction):
    """TIS, truncated importance sampling: min(r_t, cap).

    The usual choice: every token still counts, and no token counts more than `cap` times. Ionides 2008; for samplers
    that round differently Yao et al. 2025 (fengyao.notion.site/off-policy-rl). The default is 3 in TRL, and 2 in verl
    and SkyRL.

    Args:
        cap: C, the largest factor.
    """

    def __init__(self, cap: float = 2.0) -> None:
        at_least("cap", cap, 1, "TruncatedRatio")
        self.cap = cap

    def __call__(self, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
        return log_ratio.exp().clamp(max=self.cap)
