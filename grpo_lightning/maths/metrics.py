"""Numbers about the k completions of one prompt."""

import math
from collections.abc import Sequence

RIGHT_ABOVE = 0.5
"""A completion counts as right if the first reward gives it more than this."""


def pass_at_k(values: Sequence[float]) -> float:
    """1 if any of the answers is right, else 0."""
    return float(any(value > RIGHT_ABOVE for value in values))


def majority_at_k(values: Sequence[float], answers: Sequence[str | None]) -> float:
    """1 if the most frequent answer is right, else 0; of equally frequent answers the first counts."""
    votes: dict[str, list[float]] = {}
    for value, answer in zip(values, answers, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(value)
    if not votes:
        return 0.0
    return float(max(votes.values(), key=len)[0] > RIGHT_ABOVE)


def nan_mean(values: Sequence[float]) -> float:
    """The mean of the numbers among `values`; NaN if there are none."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan
