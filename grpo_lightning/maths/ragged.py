"""Ragged vectors: B segments of different lengths laid end to end in one flat vector [N], and ways to cut them up."""

from collections.abc import Sequence

import torch
from torch import Tensor


def starts(lengths: Tensor) -> Tensor:
    """First position of each segment: [3, 1, 2] -> [0, 3, 4]."""
    return lengths.cumsum(0) - lengths


def spread(values: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """One value per segment [B] -> one value per element [N].

    Args:
        values: [B].
        lengths: [B].
        total: N, where it is known: a GPU then need not be asked for the sum of `lengths`.
    """
    return values.repeat_interleave(lengths, output_size=total)


def segments(lengths: Tensor, total: int | None = None) -> Tensor:
    """Segment that each element belongs to: [3, 1, 2] -> [0, 0, 0, 1, 2, 2]; `total` as in `spread`."""
    return spread(torch.arange(len(lengths), device=lengths.device), lengths, total)


def positions(lengths: Tensor) -> Tensor:
    """Position of each element inside its segment: [3, 1, 2] -> [0, 1, 2, 0, 0, 1]."""
    return torch.arange(int(lengths.sum()), device=lengths.device) - spread(starts(lengths), lengths)


def segment_sum(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Sums of the values that share a segment index: [n], [n] -> [num_segments]; an empty segment sums to 0."""
    return torch.zeros(num_segments, dtype=values.dtype, device=values.device).index_add_(0, segment, values)


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean of each of B segments laid end to end: [N], [B] lengths, at least 1 each -> [B]."""
    return segment_sum(values, segments(lengths, len(values)), len(lengths)) / lengths


def take(rows: Tensor, lengths: Tensor) -> Tensor:
    """Flat positions of the elements of the chosen segments, in the order of `rows`: [r] -> [sum of their lengths]."""
    chosen = lengths[rows]
    return spread(starts(lengths)[rows], chosen) + positions(chosen)


def pad(values: Tensor, lengths: Tensor, value: float = 0) -> Tensor:
    """Flat [N] -> right-padded [B, max length]."""
    padded = values.new_full((len(lengths), int(lengths.max()) if len(lengths) else 0), value)
    padded[segments(lengths), positions(lengths)] = values
    return padded


KEYS_PER_TOKEN = 4
"""Most keys that a pack of groups holds, per token of its budget: attention copies a prompt's for each completion."""


def group_budget(
    prompt_lengths: Sequence[int], group: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Packs rows into few batches of at most `max_tokens`, groups whole, where a group's prompt counts once.

    Groups with the longest completions first. A group over the budget is cut into pieces of at least a row. So is one
    whose rows, each with a prompt of its own, are over four times the budget. `max_tokens=0` sets no limit.
    """
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        rows.setdefault(number, []).append(row)
    order = sorted(rows, key=lambda number: (-max(lengths[row] for row in rows[number]), number))
    batches: list[list[int]] = []
    tokens = keys = 0
    for number in order:
        prompt, own = prompt_lengths[number], sorted(rows[number], key=lambda row: (-lengths[row], row))
        whole = prompt + sum(lengths[row] for row in own), sum(prompt + lengths[row] for row in own)
        fits = max_tokens == 0 or (whole[0] <= max_tokens and whole[1] <= KEYS_PER_TOKEN * max_tokens)
        for piece in [rows[number]] if fits else [[row] for row in own]:
            continues = not fits and piece != [own[0]]
            new_tokens = sum(lengths[row] for row in piece) + (0 if continues else prompt)
            new_keys = sum(prompt + lengths[row] for row in piece)
            over = tokens + new_tokens > max_tokens or keys + new_keys > KEYS_PER_TOKEN * max_tokens
            if not batches or (max_tokens > 0 and over):
                batches.append([])
                tokens, keys = prompt if continues else 0, 0
            batches[-1] += piece
            tokens += new_tokens
            keys += new_keys
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
