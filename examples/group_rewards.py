"""Rewards of a whole group, ten lines each: `--model.rewards.function group_rewards.diversity`.

Each gets the completions of one prompt and returns as many numbers.
"""

from itertools import permutations
from typing import Any


def diversity(samples: list[Any]) -> list[float]:
    """The fraction of its words that a completion shares with no other of the group, averaged over the others."""
    words = [set(sample.text.split()) for sample in samples]
    new = [0.0] * len(samples)
    for own, other in permutations(range(len(samples)), 2):
        new[own] += len(words[own] - words[other]) / max(1, len(words[own]))
    return [value / max(1, len(samples) - 1) for value in new]


def pairwise(samples: list[Any]) -> list[float]:
    """The fraction of the other completions that it beats: a right one beats a wrong one, a tie counts half."""
    right = [sample.answer in sample.text for sample in samples]
    wins = [0.0] * len(samples)
    for own, other in permutations(range(len(samples)), 2):
        wins[own] += 0.5 * (1 + right[own] - right[other])
    return [value / max(1, len(samples) - 1) for value in wins]


def rank(samples: list[Any]) -> list[float]:
    """1 for the shortest right completion, 1/2 for the second, 1/3 for the third; equal lengths share a rank."""
    right = [sample.answer in sample.text for sample in samples]
    lengths = sorted({len(sample.token_ids) for sample, good in zip(samples, right, strict=True) if good})
    place = {length: index for index, length in enumerate(lengths, 1)}
    return [1 / place[len(sample.token_ids)] if good else 0.0 for sample, good in zip(samples, right, strict=True)]
