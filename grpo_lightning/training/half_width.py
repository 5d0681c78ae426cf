"""The half-width of the confidence interval of a validation, as a metric of torchmetrics."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from grpo_lightning import ranks
from grpo_lightning.maths.metrics import clustered_half_width


class HalfWidth(Metric):
    """The larger distance from a mean over the questions of all ranks to an end of its 95 % interval.

    See `clustered_half_width`.
    """

    values: list[Tensor]
    """A [1] float64 tensor per question."""

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=ranks.gather)
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, value: float) -> None:
        """Adds the value of a question. `compute` leaves out NaN."""
        self.values.append(torch.tensor([value], dtype=torch.float64))

    def compute(self) -> Tensor:
        """[] float32 larger distance from the mean to an end of the interval; NaN for fewer than two questions."""
        numbers = [value for values in self.values for value in values.flatten().tolist() if not math.isnan(value)]
        return torch.tensor(clustered_half_width(numbers))
