"""Attention of a shared prefix in 16 bits by one kernel for rows of any lengths, without buckets, padding or masks.

Off by default and outside the package until a GPU has confirmed it. A test asks on a CPU, with a stand-in for the
kernel, that the rows are the right ones.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import Rollouts
from grpo_lightning.plugins.compute.fast.shared_prefix import SharedPrefix


@dataclass
class Rows:
    """The rows of a micro-batch, first its prompts, then its completions, each of which sees its prompt and itself."""

    token_of_key: Tensor
    """[sum of the rows' keys] index of each key in the flat sequence."""
    query_starts: Tensor
    """[rows + 1] int32 index of each row's first query, and the number of all."""
    key_starts: Tensor
    """[rows + 1] int32 the same of keys."""
    longest_query: int
    longest_key: int

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts, device: str | torch.device) -> "Rows":
        """The rows of the flat sequence that `SharedPrefix` lays out."""
        sizes = rollouts.sizes
        lengths = torch.cat([sizes.prompt_lengths, sizes.completion_lengths])
        starts = lengths.cumsum(0) - lengths
        spans = [torch.arange(int(start), int(start + length)) for start, length in zip(starts, lengths, strict=True)]
        num_prompts = len(sizes.prompt_lengths)
        prompts = [spans[prompt] for prompt in sizes.group.tolist()]
        pairs = zip(prompts, spans[num_prompts:], strict=True)
        keys = spans[:num_prompts] + [torch.cat(pair) for pair in pairs]
        key_lengths = [len(key) for key in keys]
        return cls(
            token_of_key=torch.cat(keys).to(device),
            query_starts=_starts(lengths.tolist(), device),
            key_starts=_starts(key_lengths, device),
            longest_query=int(lengths.max()),
            longest_key=max(key_lengths),
        )


def _starts(lengths: list[int], device: str | torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


def varlen(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scaling: float | None) -> Tensor:
    """[T, H, D], [S, K, D], [S, K, E] -> [T, H, E]: each row's queries are its last keys, and see no later one."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.13 asks for it, and 2.11 does not know it.
    is_named = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if is_named else {}
    return varlen_attn(
        query,
        key,
        value,
        rows.query_starts,
        rows.key_starts,
        rows.longest_query,
        rows.longest_key,
        scale=scaling,
        window_size=(-1, 0),
        **options,
    )


Kernel = Callable[[Tensor, Tensor, Tensor, Rows, float | None], Tensor]


@contextmanager
def varlen_attention(rows: Rows, kernel: Kernel = varlen) -> Iterator[None]:
    """Every shared prefix is that of `rows` inside, and attends by the kernel."""
    buckets = SharedPrefix.attend

    def attend(
        layout: SharedPrefix, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float
    ) -> Tensor:
        keys, values = (states.transpose(0, 1).index_select(0, rows.token_of_key) for states in (key, value))
        return kernel(query.transpose(0, 1).contiguous(), keys, values, rows, scaling)

    SharedPrefix.attend = attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        SharedPrefix.attend = buckets  # type: ignore[method-assign]
