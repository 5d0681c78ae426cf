"""Target probability: decides how much a token's probability should change, not how fast.

With enough passes a clip takes every token's probability to a bound that is a fixed ratio away. Here the bound is
chosen on purpose: a good token goes to the square root of its probability, and a bad token to its square. This moves
unsure tokens most, and no target is above probability 1.
"""

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import segment_sum
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import at_least, require

TIE = 1e-6
"""A node's net advantage counts as 0 if it is at most this fraction of the sum of absolute advantages."""
LOW, HIGH = "logp_low", "logp_high"
"""Names of columns: a token has no gradient at or below its `logp_low`, and at or above its `logp_high`."""


class TargetProbability(Surrogate):
    """Maximises Â log π_θ until π_θ reaches the token's target, π_old^exponent; there the gradient ends.

    For many passes per step: each token's change is chosen, whatever the learning rate. Use it with the weighting
    `Unweighted`.

    Completions with a common prefix share its tokens, and a shared token has one target. The token is good if the
    advantages of the completions through it sum to more than 0, and bad if they sum to less. If they cancel, its
    target is its current probability. If the targets of the tokens tried after one prefix sum to more than 1 (three
    good tokens at 1/4 sum to 3/2), they are scaled to 1. A good token whose target is then below its probability keeps
    its probability.

    Args:
        good_exponent: Exponent of good tokens, from 0 to 1; 0.5 is the square root.
        bad_exponent: Exponent of bad tokens, 1 or more; 2 is the square.
        tolerance: Distance from the target, in nats, at which the target counts as reached. It matters for tokens of
            probability almost 1: their target is hardly higher and takes very long to reach.
    """

    reads_old_logp = True

    def __init__(self, good_exponent: float = 0.5, bad_exponent: float = 2.0, tolerance: float = 0.0) -> None:
        require(0 <= good_exponent <= 1, f"good_exponent={good_exponent}: give from 0 (target 1) to 1 (no change)")
        at_least("bad_exponent", bad_exponent, 1, "TargetProbability")
        at_least("tolerance", tolerance, 0, "TargetProbability")
        self.good_exponent = good_exponent
        self.bad_exponent = bad_exponent
        self.tolerance = tolerance

    def prepare(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Computes the targets: `logp_high` of good tokens, `logp_low` of bad tokens, both of other tokens."""
        assert rollouts.old_logp is not None
        tree = PrefixTree.from_rollouts(rollouts)
        logp = rollouts.old_logp.double()
        advantage = rollouts.advantage.double()
        count = segment_sum(torch.ones_like(logp), tree.node, tree.num_nodes)
        # One log-prob per node: passes over different rows may differ in rounding.
        logp = segment_sum(logp, tree.node, tree.num_nodes) / count

        # A node is good or bad by the sum of the advantages of the completions through it.
        net = segment_sum(advantage, tree.node, tree.num_nodes)
        size = segment_sum(advantage.abs(), tree.node, tree.num_nodes)
        is_good = net > TIE * size
        is_bad = net < -TIE * size
        target = logp * torch.where(is_good, self.good_exponent, torch.where(is_bad, self.bad_exponent, 1.0))

        # The targets of the children of one prefix sum to at most 1.
        total = segment_sum(target.exp(), tree.parent, tree.num_parents)
        target = target - total[tree.parent].clamp(min=1).log()
        return {
            HIGH: torch.where(is_bad, torch.inf, target - self.tolerance)[tree.node].float(),
            LOW: torch.where(is_good, -torch.inf, target + self.tolerance)[tree.node].float(),
        }

    def __call__(self, logp: Tensor, old_logp: Tensor, rollouts: Rollouts) -> SurrogateResult:
        highest = rollouts.columns[HIGH]
        lowest = rollouts.columns[LOW]
        is_high = logp >= highest
        is_low = logp <= lowest
        # At its target a token has a constant value, and so no gradient.
        target = torch.where(is_high, highest, lowest)
        return SurrogateResult(
            value=rollouts.advantage * torch.where(is_high | is_low, target, logp),
            clipped_low=is_low & ~is_high & (rollouts.advantage != 0),
            clipped_high=is_high & (rollouts.advantage != 0),
            unreachable=torch.zeros_like(is_high),
        )


@dataclass(slots=True)
class PrefixTree:
    """The completions of each group as a tree, with one node per distinct (group, prefix, sampled token).

    Context is part of a prefix: the same token after different context is another node. A context token has no node.
    """

    node: Tensor
    """[N] int64, the node of each sampled token."""
    parent: Tensor
    """[num_nodes] int64, the prefix that each node continues: its children are the tokens tried after it."""
    num_parents: int
    """The number of prefixes: more than any entry of `parent`."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.parent)

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "PrefixTree":
        """Makes the trees of all groups together, on the device of the rollouts."""
        device = rollouts.lengths.device
        sizes = rollouts.sizes
        tokens = iter(rollouts.all_token_ids[len(rollouts.prompt_token_ids) :].cpu()[sizes.order].tolist())
        num_groups = len(sizes.prompt_lengths)

        # Prefixes are numbered: first the empty prefix of each group, then every prefix that a token ends.
        prefixes: dict[tuple[int, int], int] = {}
        prefix_of_token: list[int] = []
        for prefix, length in zip(sizes.group.tolist(), sizes.completion_lengths.tolist(), strict=True):
            for token in islice(tokens, length):
                prefix = prefixes.setdefault((prefix, token), num_groups + len(prefixes))
                prefix_of_token.append(prefix)

        # Context tokens are part of a prefix, but the policy did not try them: only sampled tokens are nodes.
        nodes, node = torch.tensor(prefix_of_token, dtype=torch.int64)[sizes.sampled].unique(return_inverse=True)
        parents = torch.tensor([parent for parent, _ in prefixes], dtype=torch.int64)
        return cls(node.to(device), parents[nodes - num_groups].to(device), num_groups + len(prefixes))
