"""The learning-rate schedules of transformers, by their names in `lr_scheduler_type`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from grpo_lightning.training.schedules import RunSchedule
from grpo_lightning.types import UsageError

NEED_METRICS = ("reduce_lr_on_plateau", "greedy")
"""Schedules of transformers that wait for a metric, and follow no number of updates."""


class TransformersSchedule(RunSchedule):
    """Changes the learning rate as `lr_scheduler_type` of transformers and TRL does, update for update.

    The schedule spans the run: `trainer.max_epochs` steps of `loop.mu` x `loop.num_minibatches` updates. The first
    update of a warmup has the rate 0, as in transformers. Updates that are not made, as after a stop rule, count too.

    Args:
        optimizer: The optimizer, whose learning rate is the highest of the schedule.
        name: The schedule: `linear`, `cosine`, `cosine_with_restarts`, `cosine_with_min_lr`,
            `cosine_warmup_with_min_lr`, `polynomial`, `constant`, `constant_with_warmup`, `inverse_sqrt` or
            `warmup_stable_decay`.
        warmup: Updates of the warmup (`warmup_steps`); below 1 a fraction of the run's updates, rounded up.
        options: Keyword arguments of the schedule (`lr_scheduler_kwargs`), such as `min_lr_rate: 0.1`.
    """

    def __init__(
        self, optimizer: Optimizer, name: str = "linear", warmup: float = 0.0, options: Mapping[str, Any] | None = None
    ) -> None:
        from transformers.trainer_utils import SchedulerType

        names = [kind.value for kind in SchedulerType if kind.value not in NEED_METRICS]
        if name not in names:
            raise UsageError(f"name={name} of TransformersSchedule: give one of {', '.join(names)}")
        if warmup < 0 or (warmup > 1 and warmup != int(warmup)):
            raise UsageError(
                f"warmup={warmup} of TransformersSchedule: give a number of updates, or a fraction of them below 1"
            )
        self.name = name
        self.warmup = warmup
        self.options = dict(options or {})
        self._factor: Callable[[int], float] = lambda update: 1.0
        super().__init__(optimizer)

    def spread(self, num_updates: int) -> None:
        """Makes the schedule for the number of the run's updates."""
        from transformers import get_scheduler

        warmup = math.ceil(num_updates * self.warmup) if self.warmup < 1 else int(self.warmup)
        try:
            schedule: Any = get_scheduler(self.name, self.optimizer, warmup, num_updates, self.options)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"model.lr_scheduler=TransformersSchedule, options={self.options} with name={self.name}, "
                f"{num_updates} updates and {warmup} of warmup: {error}"
            ) from error
        self._factor = schedule.lr_lambdas[0]
        super().spread(num_updates)

    def factor(self, update: int) -> float:
        """Returns the rate of an update, as a fraction of the highest."""
        return float(self._factor(update))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state without the function, which follows from the arguments."""
        return {key: value for key, value in super().state_dict().items() if key != "_factor"}
