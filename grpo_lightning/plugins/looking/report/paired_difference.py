"""Intervals of means over seeds and questions, paired and not.

All runs of an experiment answer the same validation questions with the same random numbers, so the value of seed s in
question q is d = μ + seed effect + question effect + rest: seeds and questions are crossed. The variance of the mean
has a component of each, from the mean squares of the two-way table:

    V = MS_seeds / (S Q) + max(0, MS_questions - MS_rest) / (S Q)

The first component has S - 1 degrees of freedom, the second Q - 1. Student's t is the mean of both quantiles, weighted
by the components (Cochran 1964, Biometrics 20). A bootstrap over three seeds would be too narrow: it draws from ten
different samples and knows no t.
"""

import math

import numpy as np

from grpo_lightning.maths.metrics import t_quantile

Array = np.ndarray
Component = tuple[float, int]
"""A component of the variance of a mean, and its degrees of freedom."""


def paired_half_width(values: Array, base: Array) -> float:
    """Returns half the 95 % interval of the mean difference, by seed and question.

    Args:
        values: [S, Q] the values of one arm.
        base: [S, Q] the values of the other arm, of the same seeds and questions.
    """
    return _half_width(_components(values - base))


def unpaired_half_width(values: Array, base: Array) -> float:
    """Returns half the interval as if each arm had seeds and questions of its own.

    Args:
        values: [S, Q] the values of one arm.
        base: [S, Q] the values of the other arm.
    """
    return _half_width(_components(values) + _components(base))


def _components(values: Array) -> list[Component]:
    num_seeds, num_questions = values.shape
    deviation = values - values.mean()
    of_seed = deviation.mean(axis=1, keepdims=True)
    of_question = deviation.mean(axis=0)
    rest_of_value = deviation - of_seed - of_question
    seed_mean_square = num_questions * np.square(of_seed).sum() / (num_seeds - 1)
    question_mean_square = num_seeds * np.square(of_question).sum() / (num_questions - 1)
    rest_mean_square = np.square(rest_of_value).sum() / ((num_seeds - 1) * (num_questions - 1))
    return [
        (float(seed_mean_square) / values.size, num_seeds - 1),
        (max(0.0, float(question_mean_square - rest_mean_square)) / values.size, num_questions - 1),
    ]


def _half_width(components: list[Component]) -> float:
    variance = math.fsum(component for component, _ in components)
    if variance == 0:
        return 0.0
    return sum(component * t_quantile(df) for component, df in components) / math.sqrt(variance)
