"""Completions of one prompt through a transformer with the prompt computed once.

The prompts and completions of a pack are in one flat sequence: first all prompts, then all completions. Everything in a
transformer but attention works token by token. Attention is exact: a completion's token sees its prompt and the earlier
tokens of its completion. All are at the positions that they would have in a separate sequence.

In attention each completion's queries see a copy of its prompt's keys and their own. Rows of similar shape are attended
to together in a bucket: one prompt length, completions of similar length. So no mask depends on the row, and one long
completion pads no short ones.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from grpo_lightning.maths import ragged
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.fast.attention import causal, computed_in, fold_mask, masked

ATTENTION = "grpo_shared_prefix"

BLOCK = 256  # queries per call: those of a block see no later key, which saves up to half of the scores


class Bucket(NamedTuple):
    """Rows of one shape: `rows` x `length` queries, each row after a prefix of `prefix` keys."""

    rows: int
    prefix: int
    length: int


def length_class(length: int) -> int:
    """The largest length in the bucket of `length`: 16, 24, 36, ..., each 1.5 times the previous."""
    bound = 16
    while bound < length:
        bound += bound // 2
    return bound


def buckets_of(prefixes: Sequence[int], lengths: Sequence[int]) -> list[tuple[Bucket, list[int]]]:
    """The buckets of rows of so many tokens after so many others, and the rows in each."""
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        rows[prefix, length_class(length)].append(row)
    return [(Bucket(len(own), prefix, max(lengths[row] for row in own)), own) for (prefix, _), own in rows.items()]


@dataclass(slots=True)
class SharedPrefix:
    """Positions of all tokens in one flat sequence of T: all prompts, then all completions with their context."""

    tokens: Tensor | None  # [T] index of each token in `Rollouts.all_token_ids`; None if that is its order already
    position_ids: Tensor  # [1, T] position of each token in its own sequence
    predicts: Tensor  # [N] index of the token after which each drawn token was drawn
    buckets: list[Bucket]
    queries: Tensor
    """[sum of the buckets' queries] index of each query in the flat sequence; any index where the row is shorter."""
    keys: Tensor  # [sum of the buckets' keys] index of each key, the copies of prompts included
    filled: Tensor  # [T] index in `queries` of each token of the flat sequence
    masks: dict[tuple[int, int, int, torch.dtype], Tensor] = field(default_factory=dict)
    """The masks made so far, by offset, length, query heads per key head and dtype; all layers use the same ones."""

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "SharedPrefix":
        """Lays out the prompts and completions of `rollouts`. The work is done on the host."""
        sizes, device = rollouts.sizes, rollouts.token_ids.device
        num_prompts, num_prompt_tokens = len(sizes.prompt_lengths), int(sizes.prompt_lengths.sum())
        # A row is a prompt, after nothing, or a completion, after its prompt.
        lengths = torch.cat([sizes.prompt_lengths, sizes.completion_lengths])
        prefixes = torch.cat([torch.zeros_like(sizes.prompt_lengths), sizes.prompt_lengths[sizes.group]])
        starts, prompt = ragged.starts(lengths), torch.cat([torch.arange(num_prompts), sizes.group])
        last_of_prompt = ragged.spread((starts[prompt] + prefixes - 1)[num_prompts:], sizes.completion_lengths)
        previous = torch.arange(num_prompt_tokens, int(lengths.sum())) - 1
        before = torch.where(ragged.positions(sizes.completion_lengths) == 0, last_of_prompt, previous)
        # A copy that blocks would wait until the device has done the work of earlier packs.
        moved = methodcaller("to", device, non_blocking=True)
        tokens = None
        if rollouts.context is not None:
            tokens = moved(torch.cat([torch.arange(num_prompt_tokens), num_prompt_tokens + sizes.order]))
        buckets = buckets_of(prefixes.tolist(), lengths.tolist())
        queries, keys, filled, first = [], [], torch.empty(int(lengths.sum()), dtype=torch.int64), 0
        for bucket, members in buckets:
            rows, step = torch.tensor(members), torch.arange(bucket.length)
            index = starts[rows, None] + torch.minimum(step, lengths[rows, None] - 1)
            real = step < lengths[rows, None]
            filled[index[real]] = first + real.flatten().nonzero().squeeze(1)
            first += index.numel()
            queries.append(index.flatten())
            keys.append(torch.cat([starts[prompt[rows], None] + torch.arange(bucket.prefix), index], dim=1).flatten())
        return cls(
            tokens=tokens,
            position_ids=moved((ragged.spread(prefixes, lengths) + ragged.positions(lengths))[None]),
            predicts=moved(before[sizes.drawn]),
            buckets=[bucket for bucket, _ in buckets],
            queries=moved(torch.cat(queries)),
            keys=moved(torch.cat(keys)),
            filled=moved(filled),
        )

    def free(self) -> None:
        """Frees the attention masks, which a backward pass may have made again."""
        self.masks.clear()

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
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        """[H, T, D], [K, T, D], [K, T, E] -> [T, H, E]: every token sees its prompt and its completion up to itself.

        Not compiled: every pack has other buckets.
        """
        groups = query.shape[0] // key.shape[0]
        # [T, heads, D]: one row per token, as a model's projections leave them.
        query = query.transpose(0, 1).index_select(0, self.queries)
        key, value = (states.transpose(0, 1).index_select(0, self.keys) for states in (key, value))
        outputs = []
        sizes = [rows * length for rows, _, length in self.buckets]
        key_sizes = [rows * (prefix + length) for rows, prefix, length in self.buckets]
        parts = zip(self.buckets, query.split(sizes), key.split(key_sizes), value.split(key_sizes), strict=True)
        for (rows, prefix, length), *states in parts:
            q, k, v = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in states)
            blocks = [] if prefix else [causal(q, k, v, scaling, dropout)]
            for first in range(0, length if prefix else 0, BLOCK):
                block = q[:, :, first : first + BLOCK]
                shape = prefix + first, block.shape[2], groups, q.dtype
                if shape not in self.masks:
                    self.masks[shape] = fold_mask(*shape, q.device)
                end = prefix + first + block.shape[2]
                blocks.append(masked(block, k[:, :, :end], v[:, :, :end], self.masks[shape], scaling, dropout))
            output = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.filled)


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
    # Attention would cast them later; cast before the gathers, there is less to copy.
    dtype = computed_in(query.device, query.dtype)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if shared_prefix is not None:
        return shared_prefix.attend(query[0], key[0], value[0], scaling, dropout)[None], None
    own = is_causal is not False and getattr(module, "is_causal", True) and 1 < query.shape[2] == key.shape[2]
    own = own and attention_mask is None and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if padded_rows or own:
        return causal(query, key, value, scaling, dropout).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
