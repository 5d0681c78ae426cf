"""The options of an optimizer and its learning-rate schedule, and how a resumed run takes others."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from grpo_lightning.training.schedules import WarmupCosine
from grpo_lightning.types import UsageError


class OptimizerOptions:
    """Lets a resumed run take other options for optimizer and schedule, while the optimizer keeps its state.

    A checkpoint records which options were given. On resuming, an option with a new value takes it, and everything
    else comes from the checkpoint. So a run that changes nothing continues bit for bit. A changed schedule, or one
    that starts from another learning rate, continues as if it had been used from the first update.

    Args:
        optimizer: The optimizer as it was made.
        make_scheduler: The schedule, given the optimizer; None keeps the learning rate.
        num_updates: Updates of the whole run; None if it has no end.
    """

    def __init__(
        self, optimizer: Optimizer, make_scheduler: Callable[[Optimizer], Any] | None, num_updates: int | None
    ) -> None:
        self.optimizer = optimizer
        self._groups = [_options(group) for group in optimizer.param_groups]
        self.scheduler = None if make_scheduler is None else make_scheduler(optimizer)
        if self.scheduler is not None:
            refuse_metric(self.scheduler)
        if isinstance(self.scheduler, WarmupCosine):
            if num_updates is None:
                raise UsageError("model.lr_scheduler=WarmupCosine: set trainer.max_epochs, whose fractions it takes")
            self.scheduler.spread(num_updates)
        self._start = [_options(group) for group in optimizer.param_groups]
        self._given = {
            "class": _name(optimizer),
            "groups": _plain(self._groups),
            "schedule": None
            if self.scheduler is None
            else {"class": _name(self.scheduler), "state": _plain(self.scheduler.state_dict())},
        }
        self._changes = False
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state["given"] = self._given

    def _load(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        then = state.get("given")
        if then is None:  # of an earlier version, or of Lightning's ModelParallelStrategy
            return None
        if then["class"] != self._given["class"]:
            raise UsageError(
                f"model.optimizer={self._given['class']}: the checkpoint was saved with {then['class']}, whose state "
                "another optimizer cannot use. Give that one, or start a new run from the weights"
            )
        if len(then["groups"]) != len(self._groups):
            raise UsageError(
                f"model.optimizer: {len(self._groups)} groups of parameters, and {len(then['groups'])} in the "
                "checkpoint. Give the optimizer the run was started with"
            )
        # Some schedules set the rate themselves, and a new rate of the optimizer must not interfere.
        of_groups = self.scheduler is not None and then["groups"] != self._given["groups"]
        self._changes = of_groups or then["schedule"] != self._given["schedule"]
        groups = []
        for now, before, saved in zip(self._groups, then["groups"], state["param_groups"], strict=True):
            changed = {key: value for key, value in now.items() if key not in before or before[key] != _plain(value)}
            for key, value in changed.items():
                rank_zero_info(f"the optimizer goes on with {key}={value} instead of {before.get(key)}")
            groups.append({**saved, **changed})
        return {**state, "param_groups": groups}

    def restore_schedule(self, saved: Sequence[Mapping[str, Any]], num_updates: int) -> None:
        """Brings the schedule to where the run is, once the optimizer has its state back.

        Args:
            saved: The states of the schedules in the checkpoint: one or none.
            num_updates: Updates that the schedule has counted so far.
        """
        if not self._changes:
            if self.scheduler is not None and saved:
                self.scheduler.load_state_dict(dict(saved[0]))
            return
        for group, start in zip(self.optimizer.param_groups, self._start, strict=True):
            for key in group.keys() - start.keys() - {"params"}:
                del group[key]
            group.update(start)
        if self.scheduler is not None:
            with warnings.catch_warnings():
                # torch expects an update between two steps of a schedule.
                warnings.simplefilter("ignore")
                try:
                    for _ in range(num_updates):
                        self.scheduler.step()
                except ValueError as error:
                    raise UsageError(f"model.lr_scheduler does not reach update {num_updates}: {error}") from error
        rank_zero_info(
            f"the learning-rate schedule goes on from update {num_updates} as if these options had been given from the "
            f"first, with a learning rate of {float(self.optimizer.param_groups[0]['lr']):g}"
        )


SMALL_RATE = 1e-5
"""Below it learning rates are those of all weights: an adapter takes about ten times as much."""


def warn_of_small_rate(optimizer: Optimizer) -> None:
    """Warns of a learning rate with which an adapter hardly learns."""
    rate = max(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
    if 0 < rate < SMALL_RATE:
        rank_zero_warn(
            f"model.optimizer.lr={rate:g} is one for training all weights: with model.policy.adapter little would be "
            "learned. Give about ten times as much, between 1e-5 and 3e-4"
        )


def refuse_metric(scheduler: Any) -> None:
    """Raises UsageError for a schedule, or the class of one, whose step needs more than the call."""
    reduces = torch.optim.lr_scheduler.ReduceLROnPlateau
    kind: Any = scheduler if isinstance(scheduler, type) else type(scheduler)
    # The class's function has `self` as well.
    parameters = list(inspect.signature(kind.step).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if issubclass(kind, reduces) or needed:
        raise UsageError(
            f"model.lr_scheduler={kind.__name__}: it waits for a metric ({', '.join(needed) or 'metrics'}), and the "
            "schedule is stepped once per optimizer update. Use one that counts updates, such as LinearLR or "
            "CosineAnnealingLR"
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group as they are now, copied: a schedule may write into a tensor."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _plain(value: Any) -> Any:
    """The value as numbers, text, lists and dicts, which a checkpoint can hold and two runs can compare."""
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return type(value).__name__
