"""The completions of each group as a tree, in which completions that begin alike share their first nodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.maths.ragged import pad, positions, segments
from grpo_lightning.maths.rollouts import Rollouts


@dataclass(slots=True)
class PrefixTree:
    """Every distinct (group, prefix, next token) is a node; a token of a completion stands at one."""

    node: Tensor
    """[N] int64, each token's node."""
    parent: Tensor
    """[num_nodes] int64, the prefix a node continues; nodes with the same parent are the tokens tried after it."""
    num_parents: int

    @property
    def num_nodes(self) -> int:
        """Distinct tokens at distinct prefixes."""
        return len(self.parent)

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "PrefixTree":
        """The trees of all groups at once, on the device of the rollouts."""
        device = rollouts.lengths.device
        lengths, token_ids = rollouts.lengths.cpu(), rollouts.token_ids.cpu()
        tokens = pad(token_ids, lengths)
        vocabulary = int(token_ids.max()) + 1 if len(token_ids) else 1
        # Prefixes are numbered: first the empty one of each group, then every node's own.
        num_groups = len(rollouts.prompt_lengths)
        prefix = rollouts.group.cpu().clone()
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
        node = table[segments(lengths), positions(lengths)]
        return cls(node.to(device), torch.cat(parents).to(device), num_groups + num_nodes)
