"""The confidence interval of a validation, as a metric of torchmetrics."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from grpo_lightning import ranks
from grpo_lightning.maths.metrics import clustered_half_width


class HalfWidth(Metric):
    """The larger side of the 95 % interval of a mean over questions, as in `clustered_half_width`, over all ranks."""

    values: list[Tensor]
    """A [1] float64 tensor per question."""

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=ranks.gather)
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, value: float) -> None:
        """Adds a question's value; NaN is left out."""
        self.values.append(torch.tensor([value], dtype=torch.float64))

    def compute(self) -> Tensor:
        """[] float32 larger side of the interval; NaN for less than two questions."""
        numbers = [value for values in self.values for value in values.flatten().tolist() if not math.isnan(value)]
        return torch.tensor(clustered_half_width(numbers))
