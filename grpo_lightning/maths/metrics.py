"""Numbers about the k completions of one prompt."""

import math
from collections.abc import Sequence
from functools import cache

import mpmath
import numpy as np

RIGHT_ABOVE = 0.5
"""A completion is right if the grader gives it more. A grader says 0 or 1; of others captions name this bound."""


def with_bound(name: str) -> str:
    """The name of a grader that has other values than 0 and 1, and what is taken for right."""
    return f"{name}: reward > {RIGHT_ABOVE}"


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
    """Half the 95 % interval of a mean, t * s / √n, of n values with this sum and sum of squares; NaN below two."""
    if count < 2:
        return math.nan
    variance = max(0.0, squares - total * total / count) / (count - 1)
    return t_quantile(count - 1) * math.sqrt(variance / count)


FULLY_CLUSTERED = 2
"""Questions that are added, as if the k answers to each were one answer, where few questions tell how they vary."""


def clustered_half_width(values: Sequence[float]) -> float:
    """The larger side of the 95 % interval of a mean over questions, from a value per question; NaN below two.

    A value is the mean over k answers, which are one value: answers to one question are alike. Values from 0 to 1 have
    Wilson's interval, with Student's t, of as many independent answers as would vary as the questions do (the design
    effect; Franco, Little, Louis and Slud 2019). Near 0 and 1 its sides differ, so mean ± the larger one covers more
    than 95 %. Other values, scores of a judge, have t * s / √n.
    """
    value, count = np.asarray(values, dtype=np.float64), len(values)
    if count < 2:
        return math.nan
    mean, variance = value.mean(), value.var(ddof=1)
    if value.min() < 0 or value.max() > 1 or (variance == 0 and 0 < mean < 1):
        return half_width(count, 0.0, variance * (count - 1))
    num_answers = float(count)
    if variance > 0:
        rare = value if mean <= 0.5 else 1 - value
        num_telling = rare.sum() ** 2 / (rare**2).sum()
        answers_per_question = mean * (1 - mean) / variance
        num_answers *= (num_telling * answers_per_question + FULLY_CLUSTERED) / (num_telling + FULLY_CLUSTERED)
    z = t_quantile(count - 1) ** 2 / num_answers
    centre = (mean + z / 2) / (1 + z)
    reach = math.sqrt(mean * (1 - mean) * z + z * z / 4) / (1 + z)
    return float(reach + abs(centre - mean))


@cache
def t_quantile(df: int) -> float:
    """Student's t at 97.5 %."""

    def excess(t: mpmath.mpf) -> mpmath.mpf:
        return mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True) - 0.05

    return float(mpmath.findroot(excess, (1.9, 13.0), solver="anderson"))
