"""Target probability: say how much a token's probability should change, not how fast.

With enough passes the clip takes every token's probability to a bound that is a fixed ratio away, so choose that bound
on purpose. A good token goes to the square root of its probability, a bad one to its square: that moves unsure tokens
most and never asks for more than probability 1.
"""

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import segment_sum
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.types import at_least, require

TIE = 1e-6  # a node's net advantage counts as 0 if it is at most this fraction of the sum of absolute advantages
LOW, HIGH = "logp_low", "logp_high"  # columns: at or below the one, and at or above the other, a token stops pushing


class TargetProbability(Surrogate):
    """Â log π_θ until π_θ is at the token's target, π_old^exponent; there the token stops pushing.

    For many passes per step: each token's change is chosen, and it is the same whatever the learning rate. Use it with
    the weighting `Unweighted`.

    Completions with a common prefix share its tokens, and a shared token has one target. It counts as good if the
    advantages of the completions through it sum to more than 0, and as bad if they sum to less. If they cancel, its
    target is its current probability. If the targets of the tokens tried after one prefix sum to more than 1 (three
    good ones at 1/4 ask for 3/2), they are scaled to 1. A good token whose target is then below its probability is left
    alone.

    Args:
        good_exponent: From 0 to 1; 0.5 is the square root.
        bad_exponent: 1 or more; 2 is the square.
        tolerance: Distance from a target, in nats, that counts as being there. It matters for tokens of probability
            almost 1: their target is hardly higher and takes very long to reach.
    """

    reads_old_logp = True

    def __init__(self, good_exponent: float = 0.5, bad_exponent: float = 2.0, tolerance: float = 0.0) -> None:
        require(0 <= good_exponent <= 1, f"good_exponent={good_exponent}: give from 0 (target 1) to 1 (no change)")
        at_least("bad_exponent", bad_exponent, 1, "TargetProbability")
        at_least("tolerance", tolerance, 0, "TargetProbability")
        self.tolerance, self.good_exponent, self.bad_exponent = tolerance, good_exponent, bad_exponent

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
        upper, lower = rollouts.columns[HIGH], rollouts.columns[LOW]
        high, low = logp >= upper, logp <= lower
        held = torch.where(high, upper, lower)
        return SurrogateResult(
            value=rollouts.advantage * torch.where(high | low, held, logp),
            clipped_low=low & ~high & (rollouts.advantage != 0),
            clipped_high=high & (rollouts.advantage != 0),
            unreachable=torch.zeros_like(high),
        )


@dataclass(slots=True)
class PrefixTree:
    """The completions of each group as a tree: one node per distinct (group, prefix, drawn token).

    Context is part of a prefix: the same token after other given tokens is another node. A given token has no node.
    """

    node: Tensor  # [N] int64, each drawn token's node
    parent: Tensor  # [num_nodes] int64, the prefix that a node continues: its children are the tokens tried after it
    num_parents: int  # more than any entry of `parent`

    @property
    def num_nodes(self) -> int:
        """The number of distinct tokens after distinct prefixes."""
        return len(self.parent)

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "PrefixTree":
        """The trees of all groups at once, on the device of the rollouts."""
        device, sizes = rollouts.lengths.device, rollouts.sizes
        tokens = iter(rollouts.all_token_ids[len(rollouts.prompt_token_ids) :].cpu()[sizes.order].tolist())
        num_groups = len(sizes.prompt_lengths)
        # Prefixes are numbered: first the empty one of each group, then every one that a token ends.
        prefixes: dict[tuple[int, int], int] = {}
        prefix_of_token: list[int] = []
        for prefix, length in zip(sizes.group.tolist(), sizes.completion_lengths.tolist(), strict=True):
            for token in islice(tokens, length):
                prefix = prefixes.setdefault((prefix, token), num_groups + len(prefixes))
                prefix_of_token.append(prefix)
        # Given tokens are part of a prefix, but nobody tried them. The nodes of the drawn ones are numbered anew.
        nodes, node = torch.tensor(prefix_of_token, dtype=torch.int64)[sizes.sampled].unique(return_inverse=True)
        parents = torch.tensor([parent for parent, _ in prefixes], dtype=torch.int64)
        return cls(node.to(device), parents[nodes - num_groups].to(device), num_groups + len(prefixes))
