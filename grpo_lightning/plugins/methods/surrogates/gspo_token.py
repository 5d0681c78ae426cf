"""GSPO-token: the ratio of the sequence, with a gradient for each token."""

from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.methods.surrogates.sequence_clipped import SequenceClipped


class SequenceClippedToken(SequenceClipped):
    """GSPO-token: the ratio has the value of the sequence's ratio and the gradient of the token's ratio.

    For advantages that differ by token, as with process supervision. s_it = sg(s_i) π_θ / sg(π_θ)
    (arXiv 2507.18071, Eq. 13-14). If Â is the same for all tokens, the gradient equals the gradient of GSPO.
    """

    def ratio(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> Tensor:
        return super().ratio(logp.detach(), old_logp, rollouts) * (logp - logp.detach()).exp()
