"""The shared prefix: a group's prompt goes through the model once, not once a completion.

All tokens of a micro-batch form one flat sequence without padding, the prompts first and the completions behind
them. Everything in a transformer but attention works token by token and does not care; attention gathers, for every
prompt and every completion, the queries and keys it is about. Exact: a completion's token sees its prompt and what
stands before it in its completion, at the positions they would have in a sequence of their own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from grpo_lightning import ragged
from grpo_lightning.rollouts import Rollouts

ATTENTION = "grpo_shared_prefix"


@dataclass(slots=True)
class Part:
    """Some rows of queries and the keys they see."""

    queries: Tensor
    """[rows, L] place of each query in the flat sequence; any place where the row is shorter."""
    keys: Tensor
    """[rows, S] place of each key."""
    mask: Tensor | None
    """[rows or 1, 1, L, S] bool, what is seen; None means causal, with L = S."""
    filled: Tensor
    """[tokens] places in `queries`, flattened, that hold a real query, in the order of the flat sequence."""


@dataclass(slots=True)
class SharedPrefix:
    """Where everything stands in the flat sequence of T = (tokens of all prompts) + N tokens."""

    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T] position of each token in its own sequence."""
    predicts: Tensor
    """[N] place of the token behind which each completion token was drawn."""
    parts: tuple[Part, Part]
    """The prompts and the completions."""

    @classmethod
    def of(cls, rollouts: Rollouts) -> "SharedPrefix":
        """Lays out the prompts and completions of `rollouts`."""
        group, lengths, prompt_lengths = rollouts.group, rollouts.lengths, rollouts.prompt_lengths
        num_prompt_tokens = len(rollouts.prompt_token_ids)
        prompt_starts = ragged.starts(prompt_lengths)
        starts = num_prompt_tokens + ragged.starts(lengths)
        positions = ragged.positions(lengths)
        own_prompt_lengths = prompt_lengths[group]

        prompt_places, prompt_filled = _places(prompt_starts, prompt_lengths)
        places, filled = _places(starts, lengths)
        width, length = prompt_places.shape[1], places.shape[1]
        steps = torch.arange(length, device=group.device)
        causal = (steps <= steps[:, None])[None, None]
        # Prompts of one length need one mask for all rows.
        known = own_prompt_lengths[:1] if bool((prompt_lengths == width).all()) else own_prompt_lengths
        seen = (torch.arange(width, device=group.device) < known[:, None])[:, None, None]
        mask = torch.cat([seen.expand(-1, 1, length, -1), causal.expand(len(known), -1, -1, -1)], dim=-1)

        last_of_prompt = (prompt_starts + prompt_lengths - 1)[group]
        previous = ragged.spread(starts, lengths) + positions - 1
        return cls(
            input_ids=torch.cat([rollouts.prompt_token_ids, rollouts.token_ids])[None],
            position_ids=torch.cat(
                [ragged.positions(prompt_lengths), ragged.spread(own_prompt_lengths, lengths) + positions]
            )[None],
            predicts=torch.where(positions == 0, ragged.spread(last_of_prompt, lengths), previous),
            parts=(
                Part(prompt_places, prompt_places, None, prompt_filled),
                Part(places, torch.cat([prompt_places[group], places], dim=1), mask, filled),
            ),
        )


def _places(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, longest] places of ragged rows, the last one repeated behind a short row, and which of them are real."""
    step = torch.arange(int(lengths.max()), device=lengths.device)
    places = starts[:, None] + torch.minimum(step, lengths[:, None] - 1)
    return places, (step < lengths[:, None]).flatten().nonzero().squeeze(1)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared_prefix: SharedPrefix | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, H, T, D], [1, K, T, D] -> [1, T, H, D]; without a `SharedPrefix`, transformers' own attention."""
    if shared_prefix is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    size = query.shape[-1]
    query, key, value = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))
    outputs = []
    for part in shared_prefix.parts:
        rows, length = part.queries.shape
        q, k, v = (
            states.index_select(0, places.flatten()).view(rows, places.shape[1], -1, size).transpose(1, 2)
            for states, places in ((query, part.queries), (key, part.keys), (value, part.keys))
        )
        output = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=part.mask,
            is_causal=part.mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2).reshape(rows * length, -1).index_select(0, part.filled))
    return torch.cat(outputs).view(1, -1, query.shape[1] // size, size), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
