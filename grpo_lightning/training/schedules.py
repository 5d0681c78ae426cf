"""A learning-rate schedule over the whole run, and resuming with other options of optimizer and schedule."""

import inspect
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo_lightning.types import UsageError


class RunSchedule(LRScheduler, ABC):
    """A schedule over the updates of the whole run, made or not. It multiplies the optimizer's rate by `factor`."""

    num_updates = 1
    """Updates of the run; `spread` sets it."""

    def spread(self, num_updates: int) -> None:
        """Sets the number of the run's updates, before the first of them."""
        self.num_updates = num_updates
        super().__init__(self.optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Returns the rate of each group at the next update."""
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]

    @abstractmethod
    def factor(self, update: int) -> float:
        """Returns what the optimizer's rate is multiplied by at an update; the run's first is 0."""


class OptimizerOptions:
    """Applies changed options of optimizer and schedule to a resumed run, while the optimizer keeps its state.

    A checkpoint records the options of its run. On resuming, changed options get their new value, and everything else
    comes from the checkpoint. So a run that changes nothing continues bit for bit. A schedule that changed, or starts
    from another learning rate, continues as if it had been used from the first update.

    Args:
        optimizer: The optimizer.
        make_scheduler: Makes the schedule of an optimizer; None: the rate is constant.
        num_updates: Updates of the whole run; None if it has no end.
    """

    def __init__(
        self, optimizer: Optimizer, make_scheduler: Callable[[Optimizer], Any] | None, num_updates: int | None
    ) -> None:
        self.optimizer = optimizer
        self._groups = _options(optimizer)
        self.scheduler = schedule = None if make_scheduler is None else make_scheduler(optimizer)
        try:
            inspect.signature(schedule.step).bind() if schedule else None
        except TypeError as error:
            # ReduceLROnPlateau, for instance, needs an argument.
            raise UsageError(
                f"model.lr_scheduler={type(schedule).__name__}: it waits for a metric ({error}), and the schedule is "
                "stepped once per optimizer update. Use one that counts updates, such as LinearLR or CosineAnnealingLR"
            ) from error
        if isinstance(schedule, RunSchedule):
            if num_updates is None:
                raise UsageError(
                    f"model.lr_scheduler={type(schedule).__name__}: set trainer.max_epochs, whose updates it spans"
                )
            schedule.spread(num_updates)
        self._start = _options(optimizer)
        self._recorded = {
            "class": _class_of(optimizer),
            "groups": _plain(self._groups),
            "schedule": schedule and {"class": _class_of(schedule), "state": _plain(schedule.state_dict())},
        }
        self._changes = False
        optimizer.register_state_dict_post_hook(lambda _, state: state.update(given=self._recorded))
        optimizer.register_load_state_dict_pre_hook(self._with_changed_options)

    def _with_changed_options(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Returns a checkpoint's state of the optimizer, with the options that have changed since then."""
        recorded = state.get("given")
        # Earlier versions, and Lightning's ModelParallelStrategy, record no options.
        if recorded is None:
            return None
        if recorded["class"] != self._recorded["class"]:
            raise UsageError(
                f"model.optimizer={self._recorded['class']}: the checkpoint was saved with {recorded['class']}, whose "
                "state another optimizer cannot use. Give that one, or start a new run from the weights"
            )

        # Some schedules set the rate themselves, and a new rate of the optimizer must not interfere.
        starts_elsewhere = self.scheduler is not None and recorded["groups"] != self._recorded["groups"]
        self._changes = starts_elsewhere or recorded["schedule"] != self._recorded["schedule"]
        groups = []
        for group, old_group, saved in zip(self._groups, recorded["groups"], state["param_groups"], strict=False):
            changed = {
                key: value for key, value in group.items() if key not in old_group or old_group[key] != _plain(value)
            }
            groups.append({**saved, **changed})
        return {**state, "param_groups": groups}

    def restore_schedule(self, saved: Sequence[Mapping[str, Any]], num_updates: int) -> None:
        """Brings the schedule to where the run is, after `num_updates`. The optimizer must have its state back."""
        if not self._changes:
            if self.scheduler is not None and saved:
                self.scheduler.load_state_dict(dict(saved[0]))
            return
        for group, start in zip(self.optimizer.param_groups, self._start, strict=True):
            group.update(start)
        with warnings.catch_warnings():
            # torch expects an update between two steps of a schedule.
            warnings.simplefilter("ignore")
            for _ in range(num_updates if self.scheduler else 0):
                self.scheduler.step()  # type: ignore[union-attr]
        rank_zero_info(
            f"the learning-rate schedule goes on from update {num_updates} as if these options had been given from the "
            f"first, with a learning rate of {float(self.optimizer.param_groups[0]['lr']):g}"
        )


def check_optimizer(
    module: Any, num_updates: int | None, device: torch.device, message_of: Callable[[Exception], str] = str
) -> None:
    """Raises UsageError if a module's optimizer cannot make a step, or its schedule not all updates of the run.

    Both are tried on a few numbers. The policy, its optimizer and the random numbers stay as they are.

    Args:
        module: A `GRPOModule`, whose weights need not be loaded.
        num_updates: Updates of the whole run; None if it has no end.
        device: Device of the weights: some optimizers work only on GPUs.
        message_of: Turns an exception into a message.
    """
    num_dims = {weights.ndim for weights in module.policy.parameters() if weights.requires_grad}
    if not num_dims:
        # The weights are not loaded yet. Norms and biases have one dimension, the matrices of adapters two.
        num_dims = {1, 2} if module.policy.adapter is None else {2}
    parameters = [nn.Parameter(torch.zeros((2,) * dims, device=device)) for dims in sorted(num_dims)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    complaint = "model.optimizer"
    with isolate_rng(device.type == "cuda"), warnings.catch_warnings(action="ignore"):
        try:
            optimizer = module.optimizer(parameters)
            complaint = f"model.optimizer={type(optimizer).__name__}: it cannot update by a gradient alone"
            # Lightning passes a closure too.
            optimizer.step(lambda: None)
            ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if ids.isdisjoint(map(id, parameters)):
                raise ValueError("it does not hold the weights that it is given")
            complaint = "model.lr_scheduler"
            scheduler = OptimizerOptions(optimizer, module.lr_scheduler, num_updates).scheduler
            for update in range(num_updates or 0) if scheduler else ():
                complaint = (
                    f"model.lr_scheduler={type(scheduler).__name__}: it ends after update {update} of {num_updates}"
                )
                scheduler.step()  # type: ignore[union-attr]
        except UsageError:
            raise
        except Exception as error:
            text = message_of(error)
            advice = ". Use AdamW, or train model.policy.adapter, of matrices alone" if "2D parameters" in text else ""
            raise UsageError(f"{complaint}: {text}{advice}") from error


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns a copy of each group's options: a schedule may write into a tensor."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _class_of(instance: Any) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def _plain(value: Any) -> Any:
    """Returns the value as numbers, text, lists and dicts, which a checkpoint can hold and two runs can compare."""
    return json.loads(
        json.dumps(value, default=lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else type(leaf).__name__)
    )
