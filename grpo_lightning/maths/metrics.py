"""Numbers about the k completions of one prompt."""

import math
from collections.abc import Sequence
from functools import cache

import mpmath

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


def half_width(count: int, total: float, squares: float) -> float:
    """Half the 95 % interval of a mean, t * s / √n, of n values with this sum and sum of squares; NaN below two.

    Of the means of k samples each it is clustered by question: k samples of one question are one value.
    """
    if count < 2:
        return math.nan
    variance = max(0.0, squares - total * total / count) / (count - 1)
    return t_quantile(count - 1) * math.sqrt(variance / count)


@cache
def t_quantile(df: int) -> float:
    """Student's t at 97.5 %."""

    def excess(t: mpmath.mpf) -> mpmath.mpf:
        return mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True) - 0.05

    return float(mpmath.findroot(excess, (1.9, 13.0), solver="anderson"))
