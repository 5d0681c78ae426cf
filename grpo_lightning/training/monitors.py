"""Metrics that callbacks watch: whether the run will log them, known before its first step."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning.types import UsageError

STEP = [
    "reward/mean",
    "reward/std",
    "reward/zero_spread",
    "rollout/length_mean",
    "rollout/length_right",
    "rollout/length_wrong",
    "rollout/length_max",
    "rollout/truncated",
    "rollout/right_and_finished",
    "rollout/tokens",
    "time/step",
    "time/explore",
    "time/reward",
    "time/logp",
    "time/optimise",
    "time/fraction_explore",
    "time/fraction_reward",
    "time/fraction_logp",
    "time/fraction_optimise",
    "time/fraction_other",
    "perf/tokens_per_second",
    "perf/tokens_per_second_explore",
    "perf/tokens_per_second_optimise",
    "time/peak_memory_gib",
    "epoch",
    "step",
]
"""What every exploration step logs."""

CONVERSATION = [
    "rollout/turns",
    "rollout/given",
    "rollout/calls",
    "rollout/failed_calls",
    "rollout/branches",
    "rollout/environment_failed",
]
"""What every exploration step with an environment logs besides."""

UPDATE = [
    "policy/objective",
    "policy/entropy",
    "policy/ratio_mean",
    "policy/ratio_max",
    "policy/kl_old",
    "policy/clip_low",
    "policy/clip_high",
    "policy/unreachable",
    "policy/logp_gap",
    "optim/grad_norm",
    "optim/lr",
    "time/update",
]
"""What every optimizer update logs."""

GROUPS = ("reward", "rollout", "policy", "mismatch", "optim", "time", "perf", "val", "update")
"""The prefixes of the names above, of validation and of the inspector."""


RENAMED = {"val/pass@1": "val/greedy"}
"""Names that others, and earlier versions, use."""

BETTER = {"max": r"reward/mean|val/(reward|greedy|\w+@\d+)|rollout/right_and_finished", "min": "val/(truncated|failed)"}
"""The metrics of which it is known whether the largest is the best or the smallest."""


def validate_monitors(callbacks: Iterable[Callback], names: Sequence[str], rewards: Iterable[str], own: bool) -> None:
    """Raises UsageError for a callback that watches a metric which the run will not log, or the wrong way round.

    Args:
        callbacks: The callbacks of the trainer, each of which may have a `monitor`.
        names: The metrics the run logs.
        rewards: The names of the rewards, any of which may log more under `reward/<name>/`.
        own: Whether code of the user may log anything.
    """
    of_rewards = re.compile(f"reward/({'|'.join(map(re.escape, rewards))})/.+")
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str):
            continue
        key = "checkpoint" if type(callback).__name__ == "StepCheckpoint" else type(callback).__name__
        if monitor in names or of_rewards.fullmatch(monitor):
            best = next((mode for mode, metrics in BETTER.items() if re.fullmatch(metrics, monitor)), None)
            if best and (mode := getattr(callback, "mode", best)) != best:
                size = "larger" if best == "max" else "smaller"
                raise UsageError(f"{key}.mode={mode}: {monitor} is better the {size} it is. Give {key}.mode={best}")
            continue
        if own and monitor.partition("/")[0] not in GROUPS:
            continue
        close = [RENAMED[monitor]] if monitor in RENAMED else get_close_matches(monitor, names, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"{key}.monitor={monitor}: the run does not log this.{hint} There are {', '.join(sorted(names))}, and more "
            "under reward/<name>/ (docs/metrics.md)"
        )


def is_own(thing: Any) -> bool:
    """Whether the class of `thing` is neither from Lightning nor from this package."""
    return type(thing).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "grpo_lightning")


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
