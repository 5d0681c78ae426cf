"""Metrics over the k completions of a prompt, and confidence intervals of means."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

RIGHT_ABOVE = 0.5
"""A completion is right if the grader gives it more. For a grader with values other than 0 and 1, captions say so."""


def with_bound(name: str) -> str:
    """Returns the name of a grader with values other than 0 and 1, and the bound above which an answer is right."""
    return f"{name}: reward > {RIGHT_ABOVE}"


def pass_at_k(values: Sequence[float]) -> float:
    """Returns the best value: of 0 and 1, 1 if any answer is right. NaN values do not count; NaN if all are NaN."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def majority_at_k(values: Sequence[float], answers: Sequence[str | None]) -> float:
    """Returns the value of the most frequent answer, and of the first among equally frequent answers.

    A completion that failed (NaN) has no vote. NaN if all failed; 0 if no other completion has an answer.
    """
    votes: dict[str, list[float]] = {}
    for value, answer in zip(values, answers, strict=True):
        if answer is not None and not math.isnan(value):
            votes.setdefault(answer, []).append(value)
    if not votes:
        return math.nan if all(map(math.isnan, values)) else 0.0
    return max(votes.values(), key=len)[0]


def nan_mean(values: Sequence[float]) -> float:
    """Returns the mean of the values that are not NaN; NaN if all are."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def half_width(count: int, total: float, squares: float) -> float:
    """Returns half the 95 % interval of a mean, t * s / √n; NaN below two values.

    Args:
        count: n, the number of values.
        total: The sum of the values.
        squares: The sum of their squares.
    """
    if count < 2:
        return math.nan
    variance = max(0.0, squares - total * total / count) / (count - 1)
    return t_quantile(count - 1) * math.sqrt(variance / count)


def with_half_width(mean: float, half: float, decimals: int = 2) -> str:
    """Returns `0.39 ± 0.04`; the mean alone if there is no interval, since `half` is 0 or NaN.

    Args:
        mean: The mean.
        half: Half its 95 % interval.
        decimals: The number of decimals. There are more if the half would be 0.00, and none from 100 on.
    """
    if abs(mean) >= 100:
        decimals = 0
    if not half > 0:
        return f"{mean:.{decimals}f}"
    decimals = max(decimals, -math.floor(math.log10(half)))
    return f"{mean:.{decimals}f} ± {half:.{decimals}f}"


FULLY_CLUSTERED = 2
"""Weight, in questions, of the assumption that the k answers to a question are one answer. It counts if few vary."""


def clustered_half_width(values: Sequence[float]) -> float:
    """Returns the larger side of the 95 % interval of a mean over questions; NaN below two questions.

    Each value is the mean over the k answers to one question, which are alike. Values from 0 to 1 get Wilson's interval
    with Student's t, for the number of independent answers that would vary as the questions do (the design effect;
    Franco, Little, Louis and Slud 2019). Near 0 and 1 its sides differ, so mean ± the larger side covers more than
    95 %. Other values, such as scores of a judge, get t * s / √n.

    Args:
        values: One value per question.
    """
    value = np.asarray(values, dtype=np.float64)
    count = len(values)
    if count < 2:
        return math.nan
    mean = value.mean()
    variance = value.var(ddof=1)
    if value.min() < 0 or value.max() > 1 or (variance == 0 and 0 < mean < 1):
        return half_width(count, 0.0, variance * (count - 1))

    # The number of independent answers. Rare values tell how questions vary: the fewer, the more like one answer each.
    num_answers = float(count)
    if variance > 0:
        rare = value if mean <= 0.5 else 1 - value
        num_telling = rare.sum() ** 2 / (rare**2).sum()
        answers_per_question = mean * (1 - mean) / variance
        num_answers *= (num_telling * answers_per_question + FULLY_CLUSTERED) / (num_telling + FULLY_CLUSTERED)

    # Wilson's interval: `centre` ± `reach`.
    z = t_quantile(count - 1) ** 2 / num_answers
    centre = (mean + z / 2) / (1 + z)
    reach = math.sqrt(mean * (1 - mean) * z + z * z / 4) / (1 + z)
    return float(reach + abs(centre - mean))


@cache
def t_quantile(df: int) -> float:
    """Returns Student's t at 97.5 % for `df` degrees of freedom.

    With t = √df tan(angle), the probability of the interval from -t to t is a finite sum over powers of the cosine
    (Abramowitz and Stegun 1964, Eq. 26.7.3 and 26.7.4). Bisection finds the angle at which it is 95 %.
    """
    powers = np.arange(df % 2, df - 1, 2)
    coefficients = np.cumprod(np.maximum(powers - 1, 1) / np.maximum(powers, 1))
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        probability = math.sin(angle) * (coefficients * math.cos(angle) ** powers).sum()
        if df % 2:
            probability = (angle + probability) * 2 / math.pi
        low, high = (angle, high) if probability < 0.95 else (low, angle)
    return math.sqrt(df) * math.tan(low)
