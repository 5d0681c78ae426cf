"""Lightning as the machine that updates run on, and the limits beyond which a run stops."""

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
"""Of `16-mixed`: gradients that overflow without being scaled up are too large themselves."""


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
    max_bad_updates: int = 5
    max_failed_rewards: float = 0.5

    def __post_init__(self) -> None:
        at_least("model.guard.grad_clip", self.grad_clip, 0)
        at_least("model.guard.max_bad_updates", self.max_bad_updates, 1)
        if not 0 <= self.max_failed_rewards <= 1:
            raise UsageError(f"model.guard.max_failed_rewards={self.max_failed_rewards}: give a fraction from 0 to 1")


class LightningMachine(Machine):
    """The trainer's strategy and the optimizer of a `GRPOModule`, which counts bad updates, for one update."""

    def __init__(self, module: Any, optimizer: LightningOptimizer) -> None:
        self.module, self.optimizer = module, optimizer

    @property
    def reduce(self) -> Callable[..., Any]:
        return self.module.trainer.strategy.reduce

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Lightning's, in `16-mixed`; in other precisions None."""
        return getattr(self.module.trainer.precision_plugin, "scaler", None)

    @property
    def scale(self) -> float:
        return self.scaler.get_scale() if self.scaler else 1.0

    def backward(self, objective: Tensor) -> None:
        # Ranks average their gradients, but J is a sum over all of them.
        self.module.manual_backward(-objective * self.module.trainer.world_size)

    def synced(self, is_last: bool) -> AbstractContextManager[None]:
        strategy = self.module.trainer.strategy
        waits = not is_last and isinstance(strategy, ParallelStrategy)
        return strategy.block_backward_sync() if waits else nullcontext()

    def alone(self) -> Sequence[nn.Parameter] | None:
        """Those that are trained: on a CPU, in one process, with nothing random in a pass, no scaler and no hook."""
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
        module, scale = self.module, self.scale
        if self.scaler:
            # As `update` does after an overflow, but by the numbers of all ranks, so that they keep one scale.
            smaller = scale * self.scaler.get_backoff_factor()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": smaller, "_growth_tracker": 0})
        # Such gradients overflow because the scale is large: with a smaller one they will not.
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
