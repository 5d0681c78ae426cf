"""Target probability: say how much a token's probability should change, not how fast.

After one author's alternative to GRPO: under enough passes the clip makes every token's probability go to a bound that
is a fixed ratio away, so choose that bound on purpose. A good token goes to the square root of its probability, a bad
one to its square, which moves unsure tokens most and can never ask for more than probability 1. Several good
tokens after the same prefix may still ask for more than 1 together (three at 1/4 ask for 3/2): then the targets after
this prefix are scaled down to a sum of 1.
"""

import torch
from torch import Tensor

from grpo_lightning.maths.prefix_tree import PrefixTree
from grpo_lightning.maths.ragged import segment_sum
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import UsageError

TIE = 1e-6
"""Advantages of completions through a node that cancel to this share of their sizes have cancelled."""


class TargetProbability(Surrogate):
    """Â log π_θ until π_θ is at the token's target, π_old^exponent; there the token stops pushing.

    Completions that begin alike share their first tokens, and a shared token has one target: it is good if the
    advantages of the completions through it sum to more than 0, bad if to less, and neither where they cancel; then
    its probability is its target. After each prefix the targets of the distinct tokens tried are divided by their sum
    where that is over 1, which may put a likely good token's target under its probability: then it rests. Use it with
    the weighting `Unweighted`: others may weigh the completions through a shared token differently than this sum does.

    Args:
        good_exponent: From 0 to 1; 0.5 is the square root.
        bad_exponent: 1 or more; 2 is the square.
        tolerance: Nats around a target that count as being there; it matters for tokens of probability almost 1, whose
            target is hardly higher and takes for ever to reach.
    """

    reads_old_logp = True

    def __init__(self, good_exponent: float = 0.5, bad_exponent: float = 2.0, tolerance: float = 0.0) -> None:
        if not 0 <= good_exponent <= 1:
            raise UsageError(f"good_exponent={good_exponent}: give a number from 0 (target 1) to 1 (no change)")
        if not bad_exponent >= 1:
            raise UsageError(f"bad_exponent={bad_exponent}: give 1 (no change) or more")
        if not tolerance >= 0:
            raise UsageError(f"tolerance={tolerance} of TargetProbability: give 0 or more nats, e.g. 0.01")
        self.tolerance = tolerance
        self.good_exponent = good_exponent
        self.bad_exponent = bad_exponent

    def prepare(self, rollouts: Rollouts) -> None:
        """Sets the targets: `logp_high` of good tokens, `logp_low` of bad ones, both of those that are neither."""
        assert rollouts.old_logp is not None
        tree = PrefixTree.from_rollouts(rollouts)
        logp, advantage = rollouts.old_logp.double(), rollouts.advantage.double()
        count = segment_sum(torch.ones_like(logp), tree.node, tree.num_nodes)
        # The same token after the same prefix; passes over different rows may differ in rounding.
        logp = segment_sum(logp, tree.node, tree.num_nodes) / count
        net = segment_sum(advantage, tree.node, tree.num_nodes)
        size = segment_sum(advantage.abs(), tree.node, tree.num_nodes)
        good, bad = net > TIE * size, net < -TIE * size
        target = logp * torch.where(good, self.good_exponent, torch.where(bad, self.bad_exponent, 1.0))
        total = segment_sum(target.exp(), tree.parent, tree.num_parents)
        target = target - total[tree.parent].clamp(min=1).log()
        rollouts.logp_high = torch.where(bad, torch.inf, target - self.tolerance)[tree.node].float()
        rollouts.logp_low = torch.where(good, -torch.inf, target + self.tolerance)[tree.node].float()

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        assert rollouts.logp_low is not None and rollouts.logp_high is not None, "prepare comes first"
        high, low = logp >= rollouts.logp_high, logp <= rollouts.logp_low
        held = torch.where(high, rollouts.logp_high, rollouts.logp_low)
        return SurrogateResult(
            value=rollouts.advantage * torch.where(high | low, held, logp),
            clipped_low=low & ~high & (rollouts.advantage != 0),
            clipped_high=high & (rollouts.advantage != 0),
            unreachable=torch.zeros_like(high),
        )
