"""The last hidden states of a reference model: all that is kept of its distributions."""

import copy
from dataclasses import dataclass

from torch import Tensor

from grpo_lightning.policy.architecture import Head


@dataclass(slots=True)
class States:
    """The states from which a model predicts some drawn tokens, and the head that makes logits of them."""

    hidden: Tensor  # [n, hidden] states before the n tokens
    head: Head
    tokens: Tensor | None = None  # [n] int64, which of the N drawn tokens they are; None: all

    @classmethod
    def read(cls, hidden: Tensor, head: Head, keeps_head: bool = False) -> list["States"]:
        """Reads them in a forward. With `keeps_head` the head's weights, gathered for that forward, outlive it."""
        if keeps_head:
            head, embedding = copy.copy(head), copy.copy(head.embedding)
            weights = {name: weight.detach().clone() for name, weight in embedding.named_parameters(recurse=False)}
            vars(embedding)["_parameters"] = {name: weights.get(name) for name in embedding._parameters}
            head.embedding = embedding
        return [cls(hidden, head)]
