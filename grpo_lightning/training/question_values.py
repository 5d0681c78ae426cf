"""A number per question of a validation, as a metric of torchmetrics."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from grpo_lightning import ranks


class QuestionValues(Metric):
    """A statistic of the values of the questions of all ranks, such as their mean; it keeps the values.

    Args:
        statistic: Computes the metric from the values that are not NaN, in the order of the questions.
    """

    rows_and_values: list[Tensor]
    """A [questions, 2] float64 tensor per update: the row of each question in its data, and its value."""

    def __init__(self, statistic: Callable[[Sequence[float]], float]) -> None:
        super().__init__(dist_sync_fn=ranks.gather)
        self.statistic = statistic
        self.add_state("rows_and_values", [], dist_reduce_fx="cat")

    def update(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Adds the values of questions, which may be none."""
        pairs = [*zip(rows, values, strict=True)]
        self.rows_and_values.append(torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2))

    def compute(self) -> Tensor:
        """[] float32 statistic of the values that are not NaN."""
        # torchmetrics makes the list one tensor where there are several ranks.
        values = in_order(dim_zero_cat(self.rows_and_values))
        return torch.tensor(self.statistic([value for value in values if not math.isnan(value)]))

    def of_all_ranks(self) -> list[float]:
        """Returns the value of every question, NaN included, in the order of the questions. Every rank must call it."""
        return in_order(torch.cat(ranks.gather(torch.cat(self.rows_and_values))))


def in_order(rows_and_values: Tensor) -> list[float]:
    """Returns the values by rising row."""
    return [value for _, value in sorted(rows_and_values.tolist())]
