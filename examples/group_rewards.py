"""Rewards of a whole group, ten lines each: `--model.rewards.function group_rewards.diversity`.

Each receives the completions of a prompt and returns as many numbers.
"""

from itertools import permutations
from typing import Any


def diversity(samples: list[Any]) -> list[float]:
    """Returns the fraction of a completion's words that another does not have, averaged over the other completions."""
    words = [set(sample.text.split()) for sample in samples]
    totals = [0.0] * len(samples)
    for index, rival in permutations(range(len(samples)), 2):
        totals[index] += len(words[index] - words[rival]) / max(1, len(words[index]))
    return [total / max(1, len(samples) - 1) for total in totals]


def pairwise(samples: list[Any]) -> list[float]:
    """Returns the fraction of rivals that a completion beats: right beats wrong, a tie counts half."""
    is_right = [sample.answer in sample.text for sample in samples]
    wins = [0.0] * len(samples)
    for index, rival in permutations(range(len(samples)), 2):
        wins[index] += 0.5 * (1 + is_right[index] - is_right[rival])
    return [value / max(1, len(samples) - 1) for value in wins]


def rank(samples: list[Any]) -> list[float]:
    """Returns 1 for the shortest right completion, 1/2 for the second, and so on; equal lengths share a rank."""
    is_right = [sample.answer in sample.text for sample in samples]
    lengths = sorted({len(sample.token_ids) for sample, right in zip(samples, is_right, strict=True) if right})
    rank_of_length = {length: index for index, length in enumerate(lengths, 1)}
    return [
        1 / rank_of_length[len(sample.token_ids)] if right else 0.0
        for sample, right in zip(samples, is_right, strict=True)
    ]
