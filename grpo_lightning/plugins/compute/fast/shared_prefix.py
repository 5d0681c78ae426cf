"""Shared prefixes: the completions of one prompt go through a transformer with the prompt computed once.

All prompts and completions of a micro-batch stand in one flat sequence of T tokens: first the prompts, then the
completions. All layers but attention work token by token, so they need no change. Each token keeps the position that
it has in its own sequence.

Attention is exact: a token of a completion sees its prompt and the earlier tokens of its completion. Its query meets a
copy of the prompt's keys, and the keys of the completion. A row is one prompt, or one completion after its prompt.
Rows with the same prompt length and similar lengths form a bucket, and go through attention together. So one mask
serves all rows of a bucket, and a long completion does not pad the short ones.
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
from grpo_lightning.plugins.compute.fast.attention import causal, computed_in, fold_mask, masked

ATTENTION = "grpo_shared_prefix"
"""Name under which transformers knows `attention`."""

BLOCK = 256
"""Queries per call of attention after a prefix. A block reads no key behind its last query: up to half the scores."""


class Bucket(NamedTuple):
    """The shape of rows that go through attention together."""

    rows: int
    """Number of rows."""
    prefix: int
    """Keys before the first query of each row: the length of its prompt; 0 for rows that are prompts."""
    length: int
    """Queries of each row; shorter rows are padded."""


def length_class(length: int) -> int:
    """Returns the largest row length in the bucket of `length`: 16, 24, 36, ..., each 1.5 times the one before."""
    bound = 16
    while bound < length:
        bound += bound // 2
    return bound


def buckets_of(prefixes: Sequence[int], lengths: Sequence[int]) -> list[tuple[Bucket, list[int]]]:
    """Sorts rows into buckets.

    Args:
        prefixes: Keys before the first query of each row.
        lengths: Queries of each row.

    Returns:
        Each bucket with the indices of its rows.
    """
    rows_by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        rows_by_shape[prefix, length_class(length)].append(row)
    return [
        (Bucket(len(rows), prefix, max(lengths[row] for row in rows)), rows)
        for (prefix, _), rows in rows_by_shape.items()
    ]


@dataclass(slots=True)
class SharedPrefix:
    """Layout of a micro-batch as one flat sequence of T tokens, and the buckets of its attention.

    Below, a slot is a place for a query or a key in a bucket; buckets stand end to end.
    """

    tokens: Tensor | None
    """[T] index of each token in `Rollouts.all_token_ids`; None if the order is the same."""
    position_ids: Tensor
    """[1, T] position of each token in its own sequence."""
    predicts: Tensor
    """[N] index of the token that predicts each sampled token: the one before it."""
    buckets: list[Bucket]
    """The shape of each bucket."""
    token_of_query: Tensor
    """[query slots] index of the token in each query slot; in padding the last token of the row."""
    token_of_key: Tensor
    """[key slots] index of the token in each key slot; a prompt is there once per completion."""
    query_of_token: Tensor
    """[T] query slot of each token."""
    masks: dict[tuple[int, int, int, torch.dtype], Tensor] = field(default_factory=dict)
    """Attention masks by offset, length, query heads per key head, and dtype. All layers use the same masks."""

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts) -> "SharedPrefix":
        """Lays out prompts and completions. The indices are computed on the CPU."""
        sizes = rollouts.sizes
        # A copy that blocks would wait until the device has done the work of earlier micro-batches.
        on_device = methodcaller("to", rollouts.token_ids.device, non_blocking=True)
        num_prompts = len(sizes.prompt_lengths)
        num_prompt_tokens = int(sizes.prompt_lengths.sum())

        # [prompts + completions] the rows, in the order of the flat sequence.
        lengths = torch.cat([sizes.prompt_lengths, sizes.completion_lengths])
        prefixes = torch.cat([torch.zeros_like(sizes.prompt_lengths), sizes.prompt_lengths[sizes.group]])
        prompt_of_row = torch.cat([torch.arange(num_prompts), sizes.group])
        starts = ragged.starts(lengths)
        num_tokens = int(lengths.sum())

        # A completion's first token is predicted by the last token of its prompt, any other by the token before it.
        last_of_prompt = (starts[prompt_of_row] + prefixes - 1)[num_prompts:]
        first_predictor = ragged.per_element(last_of_prompt, sizes.completion_lengths)
        previous = torch.arange(num_prompt_tokens, num_tokens) - 1
        is_first = ragged.positions(sizes.completion_lengths) == 0
        predictor = torch.where(is_first, first_predictor, previous)

        # `all_token_ids` has context tokens at its end; in the sequence they stand among the sampled ones.
        tokens = None
        if rollouts.context is not None:
            tokens = on_device(torch.cat([torch.arange(num_prompt_tokens), num_prompt_tokens + sizes.order]))

        # The slots of each bucket. A row that is shorter than its bucket repeats its last token.
        buckets: list[Bucket] = []
        token_of_query: list[Tensor] = []
        token_of_key: list[Tensor] = []
        query_of_token = torch.empty(num_tokens, dtype=torch.int64)
        num_slots = 0
        for bucket, members in buckets_of(prefixes.tolist(), lengths.tolist()):
            rows = torch.tensor(members)
            offset = torch.arange(bucket.length)
            is_token = offset < lengths[rows, None]
            row_tokens = starts[rows, None] + torch.minimum(offset, lengths[rows, None] - 1)
            prefix_tokens = starts[prompt_of_row[rows], None] + torch.arange(bucket.prefix)
            buckets.append(bucket)
            token_of_query.append(row_tokens.flatten())
            token_of_key.append(torch.cat([prefix_tokens, row_tokens], dim=1).flatten())
            query_of_token[row_tokens[is_token]] = num_slots + is_token.flatten().nonzero().squeeze(1)
            num_slots += row_tokens.numel()

        return cls(
            tokens=tokens,
            position_ids=on_device((ragged.per_element(prefixes, lengths) + ragged.positions(lengths))[None]),
            predicts=on_device(predictor[sizes.sampled]),
            buckets=buckets,
            token_of_query=on_device(torch.cat(token_of_query)),
            token_of_key=on_device(torch.cat(token_of_key)),
            query_of_token=on_device(query_of_token),
        )

    def free(self) -> None:
        """Frees the attention masks. A backward pass that recomputes the forward may have made them again."""
        self.masks.clear()

    def inputs(self, rollouts: Rollouts) -> dict[str, Any]:
        """Returns the arguments of the transformer's forward."""
        input_ids = rollouts.all_token_ids[None]
        if self.tokens is not None:
            input_ids = input_ids.index_select(1, self.tokens)
        return {
            "input_ids": input_ids,
            "position_ids": self.position_ids,
            # Nothing reads this mask, but its four dimensions keep transformers from making one of T x T.
            "attention_mask": input_ids.new_zeros(1, 1, 1, 1),
            "shared_prefix": self,
        }

    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        """[H, T, D], [K, T, D], [K, T, E] -> [T, H, E]: every token sees its prompt and its completion up to itself.

        It is not compiled, since every micro-batch has other buckets.
        """
        # From tokens to slots. Tokens come first, [T, heads, D], as a model's projections leave them in memory.
        query = query.transpose(0, 1).index_select(0, self.token_of_query)
        key, value = (states.transpose(0, 1).index_select(0, self.token_of_key) for states in (key, value))

        num_queries = [rows * length for rows, _, length in self.buckets]
        num_keys = [rows * (prefix + length) for rows, prefix, length in self.buckets]
        by_bucket = zip(self.buckets, query.split(num_queries), key.split(num_keys), value.split(num_keys), strict=True)
        outputs = []
        for (rows, prefix, _), *bucket_states in by_bucket:
            # [slots, heads, D] -> [rows, heads, slots per row, D]
            q, k, v = (states.unflatten(0, (rows, -1)).transpose(1, 2) for states in bucket_states)
            attend_rows = self._attend_after_prefix if prefix else causal
            outputs.append(attend_rows(q, k, v, scaling, dropout).transpose(1, 2).flatten(0, 1))

        # From slots back to tokens; padding is left behind.
        return torch.cat(outputs).index_select(0, self.query_of_token)

    def _attend_after_prefix(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float
    ) -> Tensor:
        """[B, H, L, D], [B, K, S, D], [B, K, S, E] -> [B, H, L, E]: the first S - L keys are the prefix."""
        heads_per_key = query.shape[1] // key.shape[1]
        num_seen = key.shape[2] - query.shape[2]
        outputs = []
        for block in query.split(BLOCK, dim=2):
            mask_shape = num_seen, block.shape[2], heads_per_key, block.dtype
            if mask_shape not in self.masks:
                self.masks[mask_shape] = fold_mask(*mask_shape, block.device)
            num_seen += block.shape[2]
            seen_keys, seen_values = key[:, :, :num_seen], value[:, :, :num_seen]
            outputs.append(masked(block, seen_keys, seen_values, self.masks[mask_shape], scaling, dropout))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


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
    """[1, H, T, D], [1, K, T, D], [1, K, T, E] -> [1, T, H, E]: attention by a `SharedPrefix`, or transformers' own.

    Causal attention without a mask does not go to transformers, which would use the slow math kernel in float32.

    Args:
        module: The model's attention layer.
        query: Queries, by head.
        key: Keys; several query heads may share a key head.
        value: Values.
        attention_mask: Mask of transformers; unused with a `shared_prefix` or `padded_rows`.
        scaling: Factor of the scores; None is 1 / sqrt(D).
        dropout: Probability of dropout.
        is_causal: False for a layer that sees later tokens too.
        shared_prefix: Layout of the micro-batch.
        padded_rows: True for rows padded on the right, whose mask says no more than causal attention does.
        kwargs: Further arguments of the model.
    """
    # Under autocast attention would cast them later. Cast before the gathers, they are half as large to copy.
    dtype = computed_in(query.device, query.dtype)
    query, key, value = (states.to(dtype) for states in (query, key, value))

    if shared_prefix is not None:
        return shared_prefix.attend(query[0], key[0], value[0], scaling, dropout)[None], None

    is_causal_layer = is_causal is not False and getattr(module, "is_causal", True)
    is_whole_sequence = 1 < query.shape[2] == key.shape[2]
    changes_scores = any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    is_plain = is_causal_layer and is_whole_sequence and attention_mask is None and not changes_scores
    if padded_rows or is_plain:
        return causal(query, key, value, scaling, dropout).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
