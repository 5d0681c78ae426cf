"""A stop rule for tokens at their bounds."""

from collections.abc import Sequence

from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.stopping import StopRule
from grpo_lightning.types import require


class AllConverged(StopRule):
    """Stops when the tokens have converged: they are at their clip bound, or at their target probability.

    Further passes would change little. The rule counts tokens whose Â and weight are not 0, except tokens whose bound
    lies beyond probability 1.

    Args:
        fraction: Fraction of the counted tokens that must have converged, over one whole pass.
    """

    def __init__(self, fraction: float = 0.9) -> None:
        require(0 < fraction <= 1, f"fraction={fraction} of AllConverged: give more than 0 and at most 1")
        self.fraction = fraction

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        if len(updates) % num_minibatches:
            return False
        first, *later = updates[-num_minibatches:]
        total = sum(later, first)
        num_converged = total.clipped_low + total.clipped_high
        return bool(num_converged >= self.fraction * (total.has_advantage - total.unreachable))
