"""The completions of each group as a tree, in which completions with a common prefix share its nodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import pad, positions, segments
from grpo_lightning.maths.rollouts import Rollouts


@dataclass(slots=True)
class PrefixTree:
    """The nodes of drawn tokens: one node per distinct (group, prefix, next token).

    Context is part of a prefix: the same token after other given tokens is another node. A given token has no node.
    """

    node: Tensor
    """[N] int64, each drawn token's node."""
    parent: Tensor
    """[num_nodes] int64, the prefix that a node continues; nodes with the same parent are tokens tried after it."""
    num_parents: int
    """More than any entry of `parent`."""

    @property
    def num_nodes(self) -> int:
        """Number of distinct tokens at distinct prefixes."""
        return len(self.parent)

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "PrefixTree":
        """The trees of all groups at once, on the device of the rollouts."""
        device, sizes = rollouts.lengths.device, rollouts.sizes
        lengths = sizes.completion_lengths
        token_ids = rollouts.all_token_ids[len(rollouts.prompt_token_ids) :].cpu()[sizes.order]
        tokens = pad(token_ids, lengths)
        vocabulary = int(token_ids.max()) + 1 if len(token_ids) else 1
        # Prefixes are numbered: first the empty one of each group, then every node's own.
        num_groups = len(sizes.prompt_lengths)
        prefix = sizes.group.clone()
        table = torch.empty_like(tokens)
        parents = [torch.empty(0, dtype=torch.int64)]
        num_nodes = 0
        for position in range(tokens.shape[1]):
            alive = (lengths > position).nonzero().squeeze(1)
            key = prefix[alive] * vocabulary + tokens[alive, position]
            distinct, which = key.unique(return_inverse=True)
            parents.append(distinct // vocabulary)
            table[alive, position] = which + num_nodes
            prefix[alive] = which + num_groups + num_nodes
            num_nodes += len(distinct)
        # Given tokens are part of a prefix, but nobody tried them. The nodes of the drawn ones are numbered anew.
        drawn = table[segments(lengths), positions(lengths)][sizes.drawn]
        nodes, node = drawn.unique(return_inverse=True)
        return cls(node.to(device), torch.cat(parents)[nodes].to(device), num_groups + num_nodes)
