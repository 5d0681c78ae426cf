"""Ragged vectors: B segments of different lengths, end to end in one flat vector [N], and ways to pack them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KEYS_PER_TOKEN = (
    4  # most keys in a micro-batch, per token of its budget: attention copies a prompt's keys for each completion
)


def flat(lists: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The numbers of some lists end to end, and the length of each: [[5, 6], [7]] -> [5, 6, 7] and [2, 1], int64."""
    values = torch.tensor([value for numbers in lists for value in numbers], dtype=torch.int64)
    return values, torch.tensor([len(numbers) for numbers in lists], dtype=torch.int64)


def starts(lengths: Tensor) -> Tensor:
    """First position of each segment: [3, 1, 2] -> [0, 3, 4]."""
    return lengths.cumsum(0) - lengths


def spread(values: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """One value per segment [B] -> one per element [N]. Given N as `total`, nothing waits for a GPU."""
    return values.repeat_interleave(lengths, output_size=total)


def segments(lengths: Tensor, total: int | None = None) -> Tensor:
    """Index of the segment of each element: [3, 1, 2] -> [0, 0, 0, 1, 2, 2]; `total` as in `spread`."""
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
    """Flat indices of the elements of the segments `rows`, in that order: [r] -> [sum of their lengths]."""
    chosen = lengths[rows]
    return spread(starts(lengths)[rows], chosen) + positions(chosen)


def pad(values: Tensor, lengths: Tensor, value: float = 0) -> Tensor:
    """Right-padded [B, max length] from flat [N]."""
    padded = values.new_full((len(lengths), int(lengths.max()) if len(lengths) else 0), value)
    padded[segments(lengths), positions(lengths)] = values
    return padded


def group_budget(
    prompt_lengths: Sequence[int], group: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Rows of few packs of at most `max_tokens`, with whole groups; a group's prompt counts once.

    Groups with the longest completions come first. A group over the budget is cut into pieces of at least one row. So
    is a group whose rows, each with its own prompt, exceed four times the budget. `max_tokens=0` sets no limit.
    """
    rows: dict[int, list[int]] = {}
    for row, index in enumerate(group):
        rows.setdefault(index, []).append(row)
    limit = max_tokens or math.inf
    micro_batches: list[list[int]] = []
    tokens = keys = 0
    for index in sorted(rows, key=lambda index: (-max(lengths[row] for row in rows[index]), index)):
        prompt = prompt_lengths[index]
        completions = sum(lengths[row] for row in rows[index])
        pieces = [rows[index]]
        if prompt + completions > limit or prompt * len(rows[index]) + completions > KEYS_PER_TOKEN * limit:
            pieces = [[row] for row in sorted(rows[index], key=lambda row: (-lengths[row], row))]
        new_prompt = prompt  # 0 once the micro-batch has this prompt
        for piece in pieces:
            completions = sum(lengths[row] for row in piece)
            new_keys = prompt * len(piece) + completions
            if (
                not micro_batches
                or tokens + new_prompt + completions > limit
                or keys + new_keys > KEYS_PER_TOKEN * limit
            ):
                micro_batches.append([])
                tokens, keys, new_prompt = 0, 0, prompt
            micro_batches[-1] += piece
            tokens += new_prompt + completions
            keys += new_keys
            new_prompt = 0
    return micro_batches


def token_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of few packs whose padded size, rows x longest row, is at most `max_tokens`.

    The longest rows come first, so the rows of a micro-batch have similar lengths and little padding. A row longer
    than the budget gets its own pack. `max_tokens=0` sets no limit.
    """
    micro_batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not micro_batches or (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0]] > (max_tokens or math.inf):
            micro_batches.append([])
        micro_batches[-1].append(row)
    return micro_batches
