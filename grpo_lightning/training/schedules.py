"""A learning-rate schedule whose lengths are fractions of the run."""

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo_lightning.types import UsageError


class WarmupCosine(LRScheduler):
    """Raises the learning rate linearly to that of the optimizer, then lowers it along a cosine.

    Its length is that of the run: `trainer.max_epochs` steps of `loop.mu` x `loop.num_minibatches` updates. Updates
    that are not made, as after a stop rule, count too, so the run ends at `final`. A run that goes on with more steps
    takes the rates that the longer run has from there.

    Args:
        optimizer: Its learning rate is the highest.
        warmup: Fraction of the run's updates over which the rate rises; the last of them has the highest rate.
        final: Rate of the run's last update, as a fraction of the highest.
    """

    def __init__(self, optimizer: Optimizer, warmup: float = 0.05, final: float = 0.1) -> None:
        for name, value in (("warmup", warmup), ("final", final)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name}={value} of WarmupCosine: give a fraction, 0 to 1")
        self.warmup = warmup
        self.final = final
        self.num_updates = 1
        super().__init__(optimizer)

    def spread(self, num_updates: int) -> None:
        """Takes the length of the run, before its first update."""
        self.num_updates = num_updates
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group at the next update."""
        return [rate * self.factor(self.last_epoch) for rate in self.base_lrs]

    def factor(self, update: int) -> float:
        """What the highest rate is multiplied by at an update, counted from 0."""
        rising = round(self.warmup * self.num_updates)
        if update < rising:
            return (update + 1) / rising
        progress = min(1.0, (update + 1 - rising) / max(1, self.num_updates - rising))
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
