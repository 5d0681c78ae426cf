"""The parts that attention over a shared prefix falls into: which tokens are whose keys, as regular views.

Tokens are in one flat sequence: prompts, then completions, those of a prompt side by side. A part is a block of queries
that see a block of keys, or several such blocks of one shape at even distances. So a kernel reads it where it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

LEAF = 256
"""Longest segment whose causal scores are computed in one piece: a kernel on the CPU computes those of later keys too.

A longer one is two halves, and the square of the second half's queries and the first half's keys."""


@dataclass(frozen=True, slots=True)
class Part:
    """`rows` blocks of `queries` x `keys` scores."""

    rows: int
    queries: int
    keys: int
    first_query: int
    """Index of the first row's first query in the flat sequence."""
    first_key: int
    query_step: int
    """Tokens from the first query of a row to that of the next."""
    key_step: int
    causal: bool = False
    """Whether queries are keys and see no later ones; otherwise they see all keys of their row."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one call of a kernel takes of a part: all its rows and a query head per key head, or a row and all heads.

    Either is a view of four dimensions of the flat states [T, heads, D]. Query heads that share a key head are side by
    side; `groups` is their number.
    """

    part: Part
    groups: int
    index: int
    """Of the query head among those of its key head, or of the row."""
    whole_rows: bool

    @property
    def batch(self) -> int:
        """Size of the first dimension."""
        return self.groups if self.whole_rows else self.part.rows

    def of_queries(self, states: Tensor) -> Tensor:
        """[T, H, D] -> [batch, H / groups, queries, D]."""
        token, head, _ = states.stride()
        first, step = self.part.first_query * token, self.part.query_step * token
        if self.whole_rows:
            first, step = first + self.index * step, head
        else:
            first += self.index * head
        return states.as_strided(
            (self.batch, states.shape[1] // self.groups, self.part.queries, states.shape[2]),
            (step, self.groups * head, token, 1),
            states.storage_offset() + first,
        )

    def of_keys(self, states: Tensor, shared: bool = True) -> Tensor:
        """[T, K, D] -> [batch, K, keys, D]; a row that several query heads share is there once if not `shared`."""
        token, head, _ = states.stride()
        first, step = self.part.first_key * token, self.part.key_step * token
        if self.whole_rows:
            first, step = first + self.index * step, 0
        return states.as_strided(
            (1 if self.whole_rows and not shared else self.batch, states.shape[1], self.part.keys, states.shape[2]),
            (step, head, token, 1),
            states.storage_offset() + first,
        )


def triangles(first: int, length: int, rows: int, step: int) -> Iterator[Part]:
    """The parts of `rows` segments in which every token sees itself and earlier ones; those on the diagonal first."""
    if length <= LEAF:
        yield Part(rows, length, length, first, first, step, step, causal=True)
        return
    half = length // 2
    if length % 2 == 0 and (rows == 1 or step == length):
        yield from triangles(first, half, 2 * rows, half)
    else:
        yield from triangles(first, length - half, rows, step)
        yield from triangles(first + length - half, half, rows, step)
    yield Part(rows, half, length - half, first + length - half, first, step, step)


def parts_of(prompt_lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> list[Part]:
    """All parts, for every token one on the diagonal before any other.

    Both arguments are in the order of the flat sequence: [Q] lengths of prompts, and of the completions of each.
    """
    parts: list[Part] = []
    first = 0
    for length, run in groupby([*prompt_lengths, *(length for own in rows for length in own)]):
        count = len(list(run))
        parts += triangles(first, length, count, length)
        first += count * length
    key, query = 0, sum(prompt_lengths)
    for (keys, queries), alike in groupby(zip(prompt_lengths, map(sum, rows), strict=True)):
        count = len(list(alike))
        if queries:
            parts.append(Part(count, queries, keys, query, key, queries, keys))
        key, query = key + count * keys, query + count * queries
    return parts


def calls_of(parts: Sequence[Part], groups: int) -> list[Call]:
    """The calls for all parts, as few as can be: `groups` for a part, or one for each of its rows."""
    return [
        Call(part, groups, index, whole_rows)
        for part in parts
        for whole_rows in (part.rows < groups,)
        for index in range(part.rows if whole_rows else groups)
    ]
