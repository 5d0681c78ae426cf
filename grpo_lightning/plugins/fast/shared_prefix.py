"""Completions of one prompt through a transformer with the prompt computed once.

The prompts and completions of a pack are in one flat sequence: first all prompts, then all completions. Everything in a
transformer but attention works token by token. Attention is exact: a completion's token sees its prompt and the earlier
tokens of its completion. All are at the positions that they would have in a separate sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from grpo_lightning.maths import ragged
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.fast.attention import causal
from grpo_lightning.plugins.fast.copies import Copies

ATTENTION = "grpo_shared_prefix"


@dataclass(slots=True)
class SharedPrefix:
    """Positions of all tokens in one flat sequence of T: all prompts, then all completions with their context."""

    tokens: Tensor | None
    """[T] index of each token in `Rollouts.all_token_ids`; None if that is its order already."""
    position_ids: Tensor
    """[1, T] position of each token in its own sequence."""
    predicts: Tensor
    """[N] index of the token after which each drawn token was drawn."""
    copies: Copies

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "SharedPrefix":
        """Lays out the prompts and completions of `rollouts`. The work is done on the host."""
        sizes, device = rollouts.sizes, rollouts.token_ids.device
        group, lengths, prompt_lengths = sizes.group, sizes.completion_lengths, sizes.prompt_lengths
        num_prompt_tokens = int(prompt_lengths.sum())
        prompt_starts, starts = ragged.starts(prompt_lengths), num_prompt_tokens + ragged.starts(lengths)
        positions = ragged.positions(lengths)
        last_of_prompt = (prompt_starts + prompt_lengths - 1)[group]
        previous = ragged.spread(starts, lengths) + positions - 1
        before = torch.where(positions == 0, ragged.spread(last_of_prompt, lengths), previous)
        position_ids = [ragged.positions(prompt_lengths), ragged.spread(prompt_lengths[group], lengths) + positions]
        tokens = None
        if rollouts.context is not None:
            tokens = torch.cat([torch.arange(num_prompt_tokens), num_prompt_tokens + sizes.order]).to(device)
        return cls(
            tokens=tokens,
            position_ids=torch.cat(position_ids)[None].to(device),
            predicts=before[sizes.drawn].to(device),
            copies=Copies.from_lengths(prompt_lengths, group, lengths, prompt_starts, starts, device),
        )

    def free(self) -> None:
        """Frees the attention masks, which a backward pass may have made again."""
        self.copies.masks.clear()

    def inputs(self, rollouts: Rollouts) -> dict[str, Any]:
        """The arguments of the transformer."""
        input_ids = rollouts.all_token_ids[None]
        if self.tokens is not None:
            input_ids = input_ids.index_select(1, self.tokens)
        return {
            "input_ids": input_ids,
            "position_ids": self.position_ids,
            # Nothing reads it, but a mask of four dimensions keeps transformers from making one of T x T.
            "attention_mask": input_ids.new_zeros(1, 1, 1, 1),
            "shared_prefix": self,
        }


@torch.compiler.disable
def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefix, scaling: float | None, dropout: float
) -> Tensor:
    """[H, T, D], [K, T, D], [K, T, E] -> [T, H, E]: every token sees its prompt and its completion up to itself.

    Not compiled: every pack has other buckets.
    """
    # [T, heads, D]: one row per token, as a model's projections leave them.
    query, key, value = (states.transpose(0, 1) for states in (query, key, value))
    return layout.copies.attend(query, key, value, scaling, dropout)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    shared_prefix: SharedPrefix | None = None,
    padded_rows: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, H, T, D], [1, K, T, D], [1, K, T, E] -> [1, T, H, E].

    Without a `SharedPrefix` it is transformers' own attention. The exception is causal attention without a mask, which
    transformers would send to the math kernel in float32. With `padded_rows` the mask is ignored: it has no content.
    """
    if torch.is_autocast_enabled(query.device.type):
        # Attention would cast them later; cast before the gathers, there is less to copy.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if shared_prefix is not None:
        return attend(query[0], key[0], value[0], shared_prefix, scaling, dropout)[None], None
    if padded_rows:
        return causal(query, key, value, scaling, dropout).transpose(1, 2).contiguous(), None
    own = is_causal is not False and getattr(module, "is_causal", True) and 1 < query.shape[2] == key.shape[2]
    if attention_mask is None and own and kwargs.get("position_bias") is None and kwargs.get("softcap") is None:
        return causal(query, key, value, scaling, dropout).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
