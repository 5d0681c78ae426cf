"""Callbacks that watch a metric: what Lightning neither refuses nor says."""

import re
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning.types import UsageError

BETTER = {"max": r"reward/mean|val/(reward|greedy|\w+@\d+)|rollout/right_and_finished", "min": "val/(truncated|failed)"}
"""The metrics of which it is known whether the largest is the best or the smallest."""


def validate_monitors(callbacks: Iterable[Callback], validates: bool) -> None:
    """Raises UsageError for a callback that watches a metric the wrong way round, or one of a validation that is off.

    Other mistakes show when the metric is first looked up.
    """
    for callback in callbacks:
        monitor = str(getattr(callback, "monitor", ""))
        key = "checkpoint" if type(callback).__name__ == "StepCheckpoint" else type(callback).__name__
        if monitor.startswith("val/") and not validates:
            raise UsageError(f"{key}.monitor={monitor}: the run has no validation (trainer.limit_val_batches=0)")
        best = next((mode for mode, metrics in BETTER.items() if re.fullmatch(metrics, monitor)), None)
        if best and (mode := getattr(callback, "mode", best)) != best:
            size = "larger" if best == "max" else "smaller"
            raise UsageError(f"{key}.mode={mode}: {monitor} is better the {size} it is. Give {key}.mode={best}")


def keep_patience(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Lets an EarlyStopping keep the patience that it is given now; Lightning would take that of the checkpoint."""
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and (state := checkpoint["callbacks"].get(callback.state_key)):
            state["patience"] = callback.patience


def report_early_stopping(trainer: L.Trainer) -> None:
    """Prints a line for an EarlyStopping that has just ended the run; Lightning prints none."""
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and stopped_now(trainer, callback):
            reason = str(callback.stopping_reason_message).removesuffix(" Signaling Trainer to stop.")
            rank_zero_info(f"EarlyStopping: stopped after step {callback.stopped_epoch + 1}. {reason}")


def stopped_now(trainer: L.Trainer, callback: EarlyStopping) -> bool:
    """Whether this callback ended the run, in its last step."""
    stopped = callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED
    return stopped and callback.stopped_epoch == trainer.current_epoch - 1
