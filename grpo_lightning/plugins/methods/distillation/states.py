"""The last hidden states of a reference model, from which its distributions can be computed."""

import copy
from dataclasses import dataclass

from torch import Tensor

from grpo_lightning.policy.architecture import Head


@dataclass(slots=True)
class States:
    """The states from which a model predicts n sampled tokens, and the head that computes their logits."""

    hidden: Tensor
    """[n, hidden] the states before the n tokens, in the model's dtype."""
    head: Head
    """Computes logits from states."""
    tokens: Tensor | None = None
    """[n] int64, the indices of the tokens among the N sampled tokens; None: all N tokens."""

    @classmethod
    def read(cls, hidden: Tensor, head: Head, keeps_head: bool = False) -> list["States"]:
        """Reads the states in a forward.

        Args:
            hidden: [N, hidden] the states before the sampled tokens.
            head: The head of the model.
            keeps_head: Copy the head's weights: sharded weights are gathered only for the forward.
        """
        if keeps_head:
            head = copy.copy(head)
            embedding = copy.copy(head.embedding)
            weights = {name: weight.detach().clone() for name, weight in embedding.named_parameters(recurse=False)}
            vars(embedding)["_parameters"] = {name: weights.get(name) for name in embedding._parameters}
            head.embedding = embedding
        return [cls(hidden, head)]
