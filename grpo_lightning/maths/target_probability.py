"""Target probability: say how much a token's probability should change, not how fast.

After one author's alternative to GRPO. With enough passes the clip takes every token's probability to a bound that is a
fixed ratio away, so choose that bound on purpose. A good token goes to the square root of its probability, a bad one to
its square. That moves unsure tokens most and never asks for more than probability 1. Several good tokens after the same
prefix may still ask for more than 1 together (three at 1/4 ask for 3/2). Then the targets after this prefix are scaled
to a sum of 1.
"""

import torch
from torch import Tensor

from grpo_lightning.maths.prefix_tree import PrefixTree
from grpo_lightning.maths.ragged import segment_sum
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import UsageError, at_least

TIE = 1e-6
"""The net advantage at a node counts as 0 if it is at most this fraction of the sum of absolute advantages."""

LOW, HIGH = "logp_low", "logp_high"
"""Columns: at or below the one log-prob, and at or above the other, a token no longer pushes."""


class TargetProbability(Surrogate):
    """Â log π_θ until π_θ is at the token's target, π_old^exponent; there the token stops pushing.

    For many passes per step: each token's change is chosen, and it is the same whatever the learning rate.

    Completions with a common prefix share its tokens, and a shared token has one target. It counts as good if the
    advantages of the completions through it sum to more than 0, and as bad if they sum to less. If they cancel, its
    target is its current probability. If the targets of the tokens tried after one prefix sum to more than 1, they are
    scaled to sum to 1. A good token whose scaled target is below its probability is then left alone.

    Use it with the weighting `Unweighted`: others may weight the completions through a shared token differently than
    this sum does.

    Columns: at or below log-prob `logp_low`, and at or above `logp_high`, a token no longer pushes.

    Args:
        good_exponent: From 0 to 1; 0.5 is the square root.
        bad_exponent: 1 or more; 2 is the square.
        tolerance: Distance from a target, in nats, that counts as being there. It matters for tokens of probability
            almost 1: their target is hardly higher and takes very long to reach.
    """

    reads_old_logp = True

    def __init__(self, good_exponent: float = 0.5, bad_exponent: float = 2.0, tolerance: float = 0.0) -> None:
        if not 0 <= good_exponent <= 1:
            raise UsageError(f"good_exponent={good_exponent}: give a number from 0 (target 1) to 1 (no change)")
        at_least("bad_exponent", bad_exponent, 1, "TargetProbability")
        at_least("tolerance", tolerance, 0, "TargetProbability")
        self.tolerance = tolerance
        self.good_exponent = good_exponent
        self.bad_exponent = bad_exponent

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """The targets: `logp_high` of good tokens, `logp_low` of bad ones, both of tokens that are neither."""
        assert rollouts.old_logp is not None
        tree = PrefixTree.from_rollouts(rollouts)
        logp, advantage = rollouts.old_logp.double(), rollouts.advantage.double()
        count = segment_sum(torch.ones_like(logp), tree.node, tree.num_nodes)
        # One log-prob per node: passes over different rows may differ in rounding.
        logp = segment_sum(logp, tree.node, tree.num_nodes) / count
        net = segment_sum(advantage, tree.node, tree.num_nodes)
        size = segment_sum(advantage.abs(), tree.node, tree.num_nodes)
        good, bad = net > TIE * size, net < -TIE * size
        target = logp * torch.where(good, self.good_exponent, torch.where(bad, self.bad_exponent, 1.0))
        total = segment_sum(target.exp(), tree.parent, tree.num_parents)
        target = target - total[tree.parent].clamp(min=1).log()
        return {
            HIGH: torch.where(bad, torch.inf, target - self.tolerance)[tree.node].float(),
            LOW: torch.where(good, -torch.inf, target + self.tolerance)[tree.node].float(),
        }

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        """[N] Â log π_θ, level from the target on."""
        upper, lower = rollouts.columns[HIGH], rollouts.columns[LOW]
        high, low = logp >= upper, logp <= lower
        held = torch.where(high, upper, lower)
        return SurrogateResult(
            value=rollouts.advantage * torch.where(high | low, held, logp),
            clipped_low=low & ~high & (rollouts.advantage != 0),
            clipped_high=high & (rollouts.advantage != 0),
            unreachable=torch.zeros_like(high),
        )
