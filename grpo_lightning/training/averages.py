"""Averages of the weights by callbacks of Lightning, such as `EMAWeightAveraging`.

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
"""Key of the trained weights in a checkpoint that has their average as `state_dict`."""
TENSORS_AND_HOOKS = ("_parameters", "_buffers", "_load_state_dict_pre_hooks")
"""Attributes of a torch module that a copy must not share, beside the submodules."""


def check_averages(trainer: L.Trainer, policy: Policy, is_sharded: bool) -> None:
    """Raises UsageError if a callback could not average the trained weights exactly."""
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
    """Copies the weights and buffers that are not trained into every average, and all weights before it begins.

    Lightning averages all of them, so that rounding would change frozen weights and frequencies. An average that begins
    later, as by `update_starting_at_step`, would be the untrained policy until then.
    """
    average: Any
    for average in internals.averages(trainer).values():
        averaged = chain(average.module.parameters(), average.module.buffers())
        for target, source in zip(averaged, chain(module.parameters(), module.buffers()), strict=True):
            if not (average.n_averaged and source.requires_grad):
                target.copy_(source)


def resume_trained_weights(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Makes a run without an average resume from the trained weights of a checkpoint, not from their average."""
    if CURRENT in checkpoint and not internals.averages(trainer):
        checkpoint["state_dict"] = checkpoint.pop(CURRENT)
        rank_zero_info(
            f"ckpt_path={trainer.ckpt_path}: it was saved with an average of the weights, and this run has no callback "
            "for it. The run goes on with the weights themselves"
        )


def copied_weights(module: Any, without: Sequence[str], memo: dict[int, Any]) -> Any:
    """Returns a deep copy of a module's weights and submodules, which shares all other attributes with the module.

    Args:
        module: The module.
        without: Names of submodules that the copy does not have.
        memo: As in `copy.deepcopy`.
    """
    copied: Any = object.__new__(type(module))
    memo[id(module)] = copied
    state = {name: vars(module)[name] for name in TENSORS_AND_HOOKS}
    state["_modules"] = {name: child for name, child in module.named_children() if name not in without}
    copied.__dict__ |= module.__getstate__() | copy.deepcopy(state, memo)
    return copied
