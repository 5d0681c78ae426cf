"""A learning rate that rises linearly and falls along a cosine."""

import math

from torch.optim import Optimizer

from grpo_lightning.training.schedules import RunSchedule
from grpo_lightning.types import UsageError


class WarmupCosine(RunSchedule):
    """Raises the learning rate linearly to the optimizer's rate, then lowers it along a cosine.

    The schedule spans the run: `trainer.max_epochs` steps of `loop.mu` x `loop.num_minibatches` updates. Updates
    that are not made, as after a stop rule, count too, so the run ends at `final`. Extending a run follows the longer
    run's schedule.

    Args:
        optimizer: The optimizer, whose learning rate is the highest of the schedule.
        warmup: Fraction of the run's updates over which the rate rises; the last of them has the highest rate.
        final: Rate of the run's last update, as a fraction of the highest.
    """

    def __init__(self, optimizer: Optimizer, warmup: float = 0.05, final: float = 0.1) -> None:
        for name, value in (("warmup", warmup), ("final", final)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name}={value} of WarmupCosine: give a fraction, 0 to 1")
        self.warmup = warmup
        self.final = final
        super().__init__(optimizer)

    def factor(self, update: int) -> float:
        """Returns the rate of an update, as a fraction of the highest."""
        warmup_updates = round(self.warmup * self.num_updates)
        if update < warmup_updates:
            return (update + 1) / warmup_updates
        progress = min(1.0, (update + 1 - warmup_updates) / max(1, self.num_updates - warmup_updates))
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
