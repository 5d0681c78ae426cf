"""A tiny policy with an adapter that has moved away from where it starts."""

from typing import Any

import torch

from grpo_lightning import Compute, LoRA, Policy
from helpers.tiny import model_of, tokenizer


def adapted(
    shape: str = "llama",
    moved: float = 0.1,
    dtype: torch.dtype = torch.float32,
    compute: type[Compute] = Compute,
    **lora: Any,
) -> Policy:
    """A policy with a LoRA of rank 4, each of whose numbers has moved by about `moved`."""
    torch.manual_seed(3)
    adapter = LoRA(**{"rank": 4, "alpha": 8.0} | lora)
    policy = Policy.from_model(model_of(shape).to(dtype), tokenizer(), adapter, compute())
    move(policy, moved)
    return policy


def move(policy: Policy, size: float = 0.1) -> None:
    """Adds noise to everything that is trained."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in policy.trained_state_dict().values():
            value.add_(size * torch.randn(value.shape, generator=generator))
