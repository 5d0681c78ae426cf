"""The interval of a validation, as a metric of torchmetrics."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from grpo_lightning import ranks
from grpo_lightning.maths.metrics import half_width


class HalfWidth(Metric):
    """Half the 95 % interval of a mean over questions, as in `half_width`, over all ranks."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=ranks.gather)
        self.add_state("sums", torch.zeros(3), dist_reduce_fx="sum")

    def update(self, value: float) -> None:
        """Adds a question's value, unless it is NaN."""
        if not math.isnan(value):
            self.sums += torch.tensor([1.0, value, value * value], device=self.sums.device)

    def compute(self) -> Tensor:
        """The half; NaN below two questions."""
        count, total, squares = self.sums.tolist()
        return torch.tensor(half_width(int(count), total, squares), device=self.sums.device)
