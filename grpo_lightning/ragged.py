"""Ragged vectors: B segments of different lengths laid end to end in one flat vector [N], and ways to cut them up."""

from collections.abc import Sequence

import torch
from torch import Tensor


def starts(lengths: Tensor) -> Tensor:
    """First position of each segment: [3, 1, 2] -> [0, 3, 4]."""
    return lengths.cumsum(0) - lengths


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """One value a segment [B] -> one value a position [N]."""
    return values.repeat_interleave(lengths)


def segments(lengths: Tensor) -> Tensor:
    """Segment that each element belongs to: [3, 1, 2] -> [0, 0, 0, 1, 2, 2]."""
    return spread(torch.arange(len(lengths), device=lengths.device), lengths)


def positions(lengths: Tensor) -> Tensor:
    """Position of each element inside its segment: [3, 1, 2] -> [0, 1, 2, 0, 0, 1]."""
    return torch.arange(int(lengths.sum()), device=lengths.device) - spread(starts(lengths), lengths)


def segment_sum(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Sums of the values that share a segment index: [n], [n] -> [num_segments]; an empty segment sums to 0."""
    return torch.zeros(num_segments, dtype=values.dtype, device=values.device).index_add_(0, segment, values)


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean of each of B segments laid end to end: [N], [B] lengths, at least 1 each -> [B]."""
    return segment_sum(values, segments(lengths), len(lengths)) / lengths


def take(rows: Tensor, lengths: Tensor) -> Tensor:
    """Flat positions of the elements of the chosen segments, in the order of `rows`: [r] -> [sum of their lengths]."""
    chosen = lengths[rows]
    return spread(starts(lengths)[rows], chosen) + positions(chosen)


def pad(values: Tensor, lengths: Tensor, value: float = 0) -> Tensor:
    """Flat [N] -> right-padded [B, max length]."""
    padded = values.new_full((len(lengths), int(lengths.max()) if len(lengths) else 0), value)
    padded[segments(lengths), positions(lengths)] = values
    return padded


def group_budget(
    prompt_lengths: Sequence[int], group: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Packs rows into few batches of at most `max_tokens`, groups whole, where a group's prompt counts once.

    Groups with the longest completions first. A group over the budget is cut into pieces of at least a row.
    `max_tokens=0` sets no limit.
    """
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        rows.setdefault(number, []).append(row)
    order = sorted(rows, key=lambda number: (-max(lengths[row] for row in rows[number]), number))
    batches: list[list[int]] = []
    room = 0
    for number in order:
        pieces = [rows[number]]
        if 0 < max_tokens < prompt_lengths[number] + sum(lengths[row] for row in rows[number]):
            own = token_budget([lengths[row] for row in rows[number]], max(1, max_tokens - prompt_lengths[number]))
            pieces = [[rows[number][place] for place in piece] for piece in own]
        for piece in pieces:
            size = prompt_lengths[number] + sum(lengths[row] for row in piece)
            if not batches or (max_tokens > 0 and size > room):
                batches.append([])
                room = max_tokens
            batches[-1] += piece
            room -= size
    return batches


def token_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Packs rows into few batches whose padded size, rows x longest row, stays within `max_tokens`.

    Longest first, so a batch holds rows of like length and little padding. A row longer than the budget gets a batch
    of its own. `max_tokens=0` sets no limit.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    for row in order:
        full = not batches or (max_tokens > 0 and (len(batches[-1]) + 1) * lengths[batches[-1][0]] > max_tokens)
        if full:
            batches.append([])
        batches[-1].append(row)
    return batches
