"""Completions of one prompt through a transformer with the prompt computed once.

The prompts and completions of a pack are in one flat sequence: first all prompts, then all completions. Everything in a
transformer but attention works token by token. Attention gathers, for the prompts and for the completions, queries and
the keys they see. It is exact: a completion's token sees its prompt and the earlier tokens of its completion. All are
at the positions that they would have in a separate sequence.

Rows of similar shape are attended to together in a bucket: one prompt length, completions of similar length. So no mask
depends on the row, and one long completion pads no short ones.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from grpo_lightning.maths import ragged
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.attention import causal, fold_mask, masked

ATTENTION = "grpo_shared_prefix"

BLOCK = 256
"""Queries per call: those of a block see no later key, which saves up to half of the scores."""


def length_class(length: int) -> int:
    """The largest length in the bucket of `length`: 16, 24, 36, ..., each 1.5 times the previous."""
    bound = 16
    while bound < length:
        bound += bound // 2
    return bound


@dataclass(slots=True)
class Bucket:
    """Rows of one shape: `rows` x `length` queries, each row after a prefix of `prefix` keys."""

    rows: int
    prefix: int
    length: int

    @property
    def queries(self) -> int:
        """Number of queries, padding included."""
        return self.rows * self.length

    @property
    def keys(self) -> int:
        """Number of keys, padding and each row's copy of its prompt included."""
        return self.rows * (self.prefix + self.length)


def buckets_of(
    prompt_lengths: Sequence[int], group: Sequence[int], lengths: Sequence[int]
) -> list[tuple[Bucket, list[int]]]:
    """The buckets and the rows in each: first those of the prompts, whose rows are prompts, then of the completions."""
    prompts: dict[int, list[int]] = defaultdict(list)
    for prompt, length in enumerate(prompt_lengths):
        prompts[length_class(length)].append(prompt)
    completions: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, length in enumerate(lengths):
        completions[prompt_lengths[group[row]], length_class(length)].append(row)
    return [
        *((Bucket(len(rows), 0, max(prompt_lengths[row] for row in rows)), rows) for rows in prompts.values()),
        *(
            (Bucket(len(rows), prefix, max(lengths[row] for row in rows)), rows)
            for (prefix, _), rows in completions.items()
        ),
    ]


@dataclass(slots=True)
class SharedPrefix:
    """Positions of all tokens in one flat sequence of T: all prompts, then all completions with their context."""

    tokens: Tensor | None
    """[T] index of each token in `Rollouts.all_token_ids`; None if that is its order already: nothing was given."""
    position_ids: Tensor
    """[1, T] position of each token in its own sequence."""
    predicts: Tensor
    """[N] index of the token after which each drawn token was drawn."""
    buckets: list[Bucket]
    queries: Tensor
    """[sum of the buckets' queries] index of each query in the flat sequence; any index where the row is shorter."""
    keys: Tensor
    """[sum of the buckets' keys] index of each key."""
    filled: Tensor
    """[T] index in `queries` of each token of the flat sequence."""
    masks: dict[tuple[int, int, int, torch.dtype], Tensor] = field(default_factory=dict)
    """The masks made so far, by offset, length, query heads per key head and dtype; all layers use the same ones.
    `Policy.free_masks` empties it."""

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "SharedPrefix":
        """Lays out the prompts and completions of `rollouts`. The work is done on the host."""
        sizes, device = rollouts.sizes, rollouts.token_ids.device
        group, lengths, prompt_lengths = sizes.group, sizes.completion_lengths, sizes.prompt_lengths
        num_prompt_tokens = int(prompt_lengths.sum())
        prompt_starts = ragged.starts(prompt_lengths)
        starts = num_prompt_tokens + ragged.starts(lengths)
        positions = ragged.positions(lengths)
        own_prompt_lengths = prompt_lengths[group]

        buckets = buckets_of(prompt_lengths.tolist(), group.tolist(), lengths.tolist())
        queries, keys = [], []
        filled = torch.empty(num_prompt_tokens + int(lengths.sum()), dtype=torch.int64)
        first = 0
        for bucket, members in buckets:
            rows = torch.tensor(members)
            own_starts, own_lengths = (starts, lengths) if bucket.prefix else (prompt_starts, prompt_lengths)
            step = torch.arange(bucket.length)
            index = own_starts[rows, None] + torch.minimum(step, own_lengths[rows, None] - 1)
            real = step < own_lengths[rows, None]
            filled[index[real]] = first + real.flatten().nonzero().squeeze(1)
            first += bucket.queries
            queries.append(index.flatten())
            if bucket.prefix:
                prefix = prompt_starts[group[rows], None] + torch.arange(bucket.prefix)
                index = torch.cat([prefix, index], dim=1)
            keys.append(index.flatten())

        last_of_prompt = (prompt_starts + prompt_lengths - 1)[group]
        previous = ragged.spread(starts, lengths) + positions - 1
        position_ids = torch.cat(
            [ragged.positions(prompt_lengths), ragged.spread(own_prompt_lengths, lengths) + positions]
        )
        before = torch.where(positions == 0, ragged.spread(last_of_prompt, lengths), previous)
        tokens = None
        if rollouts.context_ids is not None:
            tokens = torch.cat([torch.arange(num_prompt_tokens), num_prompt_tokens + sizes.order]).to(device)
        return cls(
            tokens=tokens,
            position_ids=position_ids[None].to(device),
            predicts=before[sizes.drawn].to(device),
            buckets=[bucket for bucket, _ in buckets],
            queries=torch.cat(queries).to(device),
            keys=torch.cat(keys).to(device),
            filled=filled.to(device),
        )

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

    def mask(self, offset: int, length: int, groups: int, query: Tensor) -> Tensor:
        """`fold_mask` of these sizes in the query's dtype, made once."""
        key = (offset, length, groups, query.dtype)
        if key not in self.masks:
            self.masks[key] = fold_mask(offset, length, groups, query.dtype, query.device)
        return self.masks[key]


@torch.compiler.disable
def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefix, scaling: float | None, dropout: float
) -> Tensor:
    """[H, T, D], [K, T, D], [K, T, E] -> [T, H, E]: every token sees its prompt and its completion up to itself.

    Not compiled: every pack has other buckets.
    """
    groups = query.shape[0] // key.shape[0]
    # [T, heads, D]: one row per token, so that gathering one copies contiguous memory.
    query, key, value = (states.transpose(0, 1) for states in (query, key, value))
    query = query.index_select(0, layout.queries)
    key, value = key.index_select(0, layout.keys), value.index_select(0, layout.keys)
    outputs = []
    sizes = [bucket.queries for bucket in layout.buckets], [bucket.keys for bucket in layout.buckets]
    parts = zip(layout.buckets, query.split(sizes[0]), key.split(sizes[1]), value.split(sizes[1]), strict=True)
    for bucket, *states in parts:
        q, k, v = (part.unflatten(0, (bucket.rows, -1)).transpose(1, 2) for part in states)
        if bucket.prefix == 0:
            outputs.append(causal(q, k, v, scaling, dropout).transpose(1, 2).flatten(0, 1))
            continue
        blocks = []
        for first in range(0, bucket.length, BLOCK):
            block = q[:, :, first : first + BLOCK]
            end = bucket.prefix + first + block.shape[2]
            mask = layout.mask(bucket.prefix + first, block.shape[2], groups, q)
            blocks.append(masked(block, k[:, :, :end], v[:, :, :end], mask, scaling, dropout))
        output = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.filled)


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
