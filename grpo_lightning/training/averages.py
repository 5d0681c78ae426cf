"""Averages of the weights, which callbacks of Lightning keep beside those that are trained (`EMAWeightAveraging`).

Lightning validates with the average, saves it as the weights of a checkpoint, and leaves it in the module at the end.
"""

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from grpo_lightning.policy.policy import Policy
from grpo_lightning.training import internals
from grpo_lightning.types import UsageError

CURRENT = "current_model_state"
"""Where a checkpoint with an average has the weights that the optimizer moves."""
TENSORS_AND_HOOKS = ("_parameters", "_buffers", "_load_state_dict_pre_hooks")
"""What of a torch module, beside its submodules, a copy must have for itself."""


def check_averages(trainer: L.Trainer, policy: Policy, is_sharded: bool) -> None:
    """Raises UsageError where the average would not be one of the weights that are trained."""
    for callback in internals.averages(trainer):
        key = f"trainer.callbacks={type(callback).__name__}"
        if is_sharded:
            raise UsageError(
                f"{key}: it averages whole weights, and this strategy shards them. Use ddp, or leave it out"
            )
        if any(weight.itemsize < 4 for weight in policy.parameters() if weight.requires_grad):
            raise UsageError(
                f"{key}: model.policy.dtype={str(policy.dtype).removeprefix('torch.')} would round most steps of the "
                "average away. Set model.policy.dtype=float32, and trainer.precision=bf16-mixed for the same speed"
            )


@torch.no_grad()
def complete_averages(trainer: L.Trainer, module: nn.Module) -> None:
    """Gives every average the weights and buffers that are not trained, and before it begins all weights as they are.

    Lightning averages all of them, so that rounding would move frozen weights and frequencies. An average that begins
    later, as by `update_starting_at_step`, would be the untrained policy until then.
    """
    average: Any
    for average in internals.averages(trainer).values():
        averaged = chain(average.module.parameters(), average.module.buffers())
        for target, source in zip(averaged, chain(module.parameters(), module.buffers()), strict=True):
            if not (average.n_averaged and source.requires_grad):
                target.copy_(source)


def resume_trained_weights(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Lets a run without an average go on with the weights that the optimizer moved, not with their average."""
    if CURRENT in checkpoint and not internals.averages(trainer):
        checkpoint["state_dict"] = checkpoint.pop(CURRENT)
        rank_zero_info(
            f"ckpt_path={trainer.ckpt_path}: it was saved with an average of the weights, and this run has no callback "
            "for it. The run goes on with the weights themselves"
        )


def copied_weights(module: Any, without: Sequence[str], memo: dict[int, Any]) -> Any:
    """A deep copy of a module's weights and submodules, but for those `without`; whatever else it has stays shared."""
    copied: Any = object.__new__(type(module))
    memo[id(module)] = copied
    own_state = {name: vars(module)[name] for name in TENSORS_AND_HOOKS}
    own_state["_modules"] = {name: child for name, child in module.named_children() if name not in without}
    copied.__dict__ |= module.__getstate__() | copy.deepcopy(own_state, memo)
    return copied
