"""Ragged vectors: B segments of different lengths, end to end in one flat vector [N], and cuts into micro-batches."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KEYS_PER_TOKEN = 4
"""Most keys in a micro-batch per token of its budget: attention copies a prompt's keys for each completion."""


def flat(lists: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Concatenates lists of numbers: [[5, 6], [7]] -> [5, 6, 7] and the lengths [2, 1], both int64."""
    values = torch.tensor([value for numbers in lists for value in numbers], dtype=torch.int64)
    return values, torch.tensor([len(numbers) for numbers in lists], dtype=torch.int64)


def starts(lengths: Tensor) -> Tensor:
    """[B] the index of each segment's first element: [3, 1, 2] -> [0, 3, 4]."""
    return lengths.cumsum(0) - lengths


def per_element(values: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Repeats one value per segment [B] for each of its elements: [N]. With `total` = N nothing waits for a GPU."""
    return values.repeat_interleave(lengths, output_size=total)


def segments(lengths: Tensor, total: int | None = None) -> Tensor:
    """[N] the segment of each element: [3, 1, 2] -> [0, 0, 0, 1, 2, 2]; `total` as in `per_element`."""
    return per_element(torch.arange(len(lengths), device=lengths.device), lengths, total)


def positions(lengths: Tensor) -> Tensor:
    """[N] the position of each element inside its segment: [3, 1, 2] -> [0, 1, 2, 0, 0, 1]."""
    return torch.arange(int(lengths.sum()), device=lengths.device) - per_element(starts(lengths), lengths)


def segment_sum(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """[num_segments] sums of the [n] values with the same [n] segment index; an empty segment sums to 0."""
    return torch.zeros(num_segments, dtype=values.dtype, device=values.device).index_add_(0, segment, values)


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """[B] means of segments that are laid end to end: [N] values, [B] lengths of at least 1."""
    return segment_sum(values, segments(lengths, len(values)), len(lengths)) / lengths


def take(rows: Tensor, lengths: Tensor) -> Tensor:
    """[sum of their lengths] the flat indices of the elements of the segments `rows` [r], in that order."""
    row_lengths = lengths[rows]
    return per_element(starts(lengths)[rows], row_lengths) + positions(row_lengths)


def pad(values: Tensor, lengths: Tensor, value: float = 0) -> Tensor:
    """[B, max length] right-padded rows from flat [N] values."""
    padded = values.new_full((len(lengths), int(lengths.max()) if len(lengths) else 0), value)
    padded[segments(lengths), positions(lengths)] = values
    return padded


def group_budget(
    prompt_lengths: Sequence[int], group: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Cuts rows into few micro-batches of at most `max_tokens`, with whole groups; a group's prompt counts once.

    Groups with the longest completions come first. A group over the budget may be cut between any two rows. So may a
    group whose rows exceed four times the budget if each row's prompt is counted. `max_tokens=0` sets no limit.

    Returns:
        The rows of each micro-batch.
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

        # A piece joins the last micro-batch or begins a new one. Once the micro-batch has the prompt, it costs nothing.
        new_prompt = prompt
        for piece in pieces:
            completions = sum(lengths[row] for row in piece)
            new_keys = prompt * len(piece) + completions
            if (
                not micro_batches
                or tokens + new_prompt + completions > limit
                or keys + new_keys > KEYS_PER_TOKEN * limit
            ):
                micro_batches.append([])
                tokens = keys = 0
                new_prompt = prompt
            micro_batches[-1] += piece
            tokens += new_prompt + completions
            keys += new_keys
            new_prompt = 0
    return micro_batches


def token_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cuts rows into few micro-batches whose padded size, rows x longest row, is at most `max_tokens`.

    The longest rows come first, so the rows of a micro-batch have similar lengths and little padding. A row longer
    than the budget gets its own micro-batch. `max_tokens=0` sets no limit.

    Returns:
        The rows of each micro-batch.
    """
    micro_batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not micro_batches or (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0]] > (max_tokens or math.inf):
            micro_batches.append([])
        micro_batches[-1].append(row)
    return micro_batches
