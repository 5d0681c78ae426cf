"""Numbers about the k completions of one prompt."""

import math
from collections.abc import Sequence

RIGHT_ABOVE = 0.5  # a completion counts as right if the reward that decides gives it more


def pass_at_k(values: Sequence[float]) -> float:
    """The best of the values that are not NaN; NaN if all are. Of 0 and 1: whether any of the answers is right."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def majority_at_k(values: Sequence[float], answers: Sequence[str | None]) -> float:
    """The value of the most frequent answer; of equally frequent answers the first counts.

    NaN marks completions that failed, which have no vote: NaN if all have, 0 if the others gave no answer.
    """
    votes: dict[str, list[float]] = {}
    for value, answer in zip(values, answers, strict=True):
        if answer is not None and not math.isnan(value):
            votes.setdefault(answer, []).append(value)
    if not votes:
        return math.nan if all(map(math.isnan, values)) else 0.0
    return max(votes.values(), key=len)[0]


def nan_mean(values: Sequence[float]) -> float:
    """The mean of the numbers among `values`; NaN if there are none."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan
