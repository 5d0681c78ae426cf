"""Attention over a shared prefix by copies: each completion's queries see a copy of its prompt's keys and their own.

Rows of similar shape are attended to together in a bucket: one prompt length, completions of similar length. So no mask
depends on the row, and one long completion pads no short ones.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lightning.plugins.fast.attention import causal, fold_mask, masked

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
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for prompt, length in enumerate(prompt_lengths):
        rows[0, length_class(length)].append(prompt)
    for row, length in enumerate(lengths):
        rows[prompt_lengths[group[row]], length_class(length)].append(row)
    return [
        (Bucket(len(own), prefix, max((lengths if prefix else prompt_lengths)[row] for row in own)), own)
        for (prefix, _), own in rows.items()
    ]


@dataclass(slots=True)
class Copies:
    """Indices of the queries and keys of all buckets in one flat sequence of T tokens."""

    buckets: list[Bucket]
    queries: Tensor
    """[sum of the buckets' queries] index of each query in the flat sequence; any index where the row is shorter."""
    keys: Tensor
    """[sum of the buckets' keys] index of each key."""
    filled: Tensor
    """[T] index in `queries` of each token of the flat sequence."""
    masks: dict[tuple[int, int, int, torch.dtype], Tensor] = field(default_factory=dict)
    """The masks made so far, by offset, length, query heads per key head and dtype; all layers use the same ones.
    `SharedPrefix.free` empties it."""

    @classmethod
    def from_lengths(
        cls,
        prompt_lengths: Tensor,
        group: Tensor,
        lengths: Tensor,
        prompt_starts: Tensor,
        starts: Tensor,
        device: torch.device,
    ) -> "Copies":
        """The copies for prompts [Q] and completions [B] with these starts. The work is done on the host."""
        buckets = buckets_of(prompt_lengths.tolist(), group.tolist(), lengths.tolist())
        queries, keys = [], []
        filled = torch.empty(int(prompt_lengths.sum() + lengths.sum()), dtype=torch.int64)
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
        return cls(
            buckets=[bucket for bucket, _ in buckets],
            queries=torch.cat(queries).to(device),
            keys=torch.cat(keys).to(device),
            filled=filled.to(device),
        )

    def mask(self, offset: int, length: int, groups: int, query: Tensor) -> Tensor:
        """`fold_mask` of these sizes in the query's dtype, made once."""
        key = (offset, length, groups, query.dtype)
        if key not in self.masks:
            self.masks[key] = fold_mask(offset, length, groups, query.dtype, query.device)
        return self.masks[key]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        """[T, H, D], [T, K, D], [T, K, E] -> [T, H, E]: every token sees its prompt and its completion up to itself."""
        groups = query.shape[1] // key.shape[1]
        query = query.index_select(0, self.queries)
        key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
        outputs = []
        sizes = [bucket.queries for bucket in self.buckets], [bucket.keys for bucket in self.buckets]
        parts = zip(self.buckets, query.split(sizes[0]), key.split(sizes[1]), value.split(sizes[1]), strict=True)
        for bucket, *states in parts:
            q, k, v = (part.unflatten(0, (bucket.rows, -1)).transpose(1, 2) for part in states)
            if bucket.prefix == 0:
                outputs.append(causal(q, k, v, scaling, dropout).transpose(1, 2).flatten(0, 1))
                continue
            blocks = []
            for first in range(0, bucket.length, BLOCK):
                block = q[:, :, first : first + BLOCK]
                end = bucket.prefix + first + block.shape[2]
                mask = self.mask(bucket.prefix + first, block.shape[2], groups, q)
                blocks.append(masked(block, k[:, :, :end], v[:, :, :end], mask, scaling, dropout))
            output = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.filled)
