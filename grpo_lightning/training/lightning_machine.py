"""Makes updates on Lightning's trainer, and holds the limits beyond which a run stops."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from grpo_lightning.policy.machine import Machine
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import UsageError, at_least

SMALLEST_SCALE = 1.0
"""Scale of the gradients of `16-mixed` at which an overflow counts as a bad update: nothing scaled the gradient up."""


@dataclass
class Guard:
    """Limits beyond which gradients are clipped or the run stops.

    Args:
        grad_clip: Largest norm of the gradient; 0 does not clip.
        max_bad_updates: The run stops after this number of updates in a row whose loss or gradient is not finite. In
            `16-mixed` a gradient that overflows because it is scaled up only halves its scale, and does not count.
        max_failed_rewards: Largest fraction of the samples of a step, or a validation, over all ranks, that a reward
            may fail on before the run stops.
    """

    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    max_bad_updates: int = 5
    """Number of updates in a row without a finite loss and gradient after which the run stops."""
    max_failed_rewards: float = 0.5
    """Largest fraction of samples that a reward may fail on before the run stops."""

    def __post_init__(self) -> None:
        at_least("model.guard.grad_clip", self.grad_clip, 0)
        at_least("model.guard.max_bad_updates", self.max_bad_updates, 1)
        if not 0 <= self.max_failed_rewards <= 1:
            raise UsageError(f"model.guard.max_failed_rewards={self.max_failed_rewards}: give a fraction from 0 to 1")


class LightningMachine(Machine):
    """Makes one update of a `GRPOModule` with the trainer's strategy. The module counts bad updates.

    Args:
        module: The `GRPOModule`, attached to a trainer.
        optimizer: The optimizer of its policy.
    """

    def __init__(self, module: Any, optimizer: LightningOptimizer) -> None:
        self.module = module
        self.optimizer = optimizer

    @property
    def reduce(self) -> Callable[..., Any]:
        return self.module.trainer.strategy.reduce

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Lightning's gradient scaler in `16-mixed`; None in other precisions."""
        return getattr(self.module.trainer.precision_plugin, "scaler", None)

    @property
    def gradient_scale(self) -> float:
        return self.scaler.get_scale() if self.scaler else 1.0

    def backward(self, objective: Tensor) -> None:
        # The strategy averages gradients over ranks, but J is a sum over ranks.
        self.module.manual_backward(-objective * self.module.trainer.world_size)

    def synced(self, is_last: bool) -> AbstractContextManager[None]:
        strategy = self.module.trainer.strategy
        waits = not is_last and isinstance(strategy, ParallelStrategy)
        return strategy.block_backward_sync() if waits else nullcontext()

    def alone(self) -> Sequence[nn.Parameter] | None:
        """Returns the trained weights on a CPU, in one process, without dropout, scaler and hooks; None otherwise."""
        policy: Policy = self.module.policy
        hooks = ("on_before_backward", "on_after_backward")
        if any(is_overridden(hook, callback, Callback) for callback in self.module.trainer.callbacks for hook in hooks):
            return None
        if self.module.device.type != "cpu" or self.module.trainer.world_size > 1 or policy.dropout or self.scaler:
            return None
        return [parameter for parameter in policy.parameters() if parameter.requires_grad]

    def step(self) -> None:
        self.module.bad_updates_in_a_row.zero_()
        self.optimizer.step()

    def skip(self, objective: Tensor, grad_norm: Tensor) -> None:
        module = self.module
        scale = self.gradient_scale
        if self.scaler:
            # The scaler's `update` does this after an overflow of one rank; here all ranks keep the same scale.
            new_scale = scale * self.scaler.get_backoff_factor()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": new_scale, "_growth_tracker": 0})
        # The gradient overflowed because of the scale, which is smaller now: this is not a bad update.
        if bool(objective.isfinite()) and scale > SMALLEST_SCALE:
            return
        module.bad_updates += 1
        module.bad_updates_in_a_row += 1
        if module.bad_updates_in_a_row >= module.guard.max_bad_updates:
            scaled = f", scale of the float16 gradients {scale:g}" if self.scaler else ""
            raise FloatingPointError(
                f"{int(module.bad_updates_in_a_row)} updates in a row were not finite (objective {float(objective)}, "
                f"gradient norm {float(grad_norm)}{scaled}); guard.max_bad_updates={module.guard.max_bad_updates}. "
                "Lower the learning rate, use precision 32-true, or look at the last step with `grpo inspect`"
            )
