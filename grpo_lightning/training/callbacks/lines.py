"""One line per step, for a run that is not watched in a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning.training.callbacks.validations import Scores, headline, is_sanity_check, measure_of, scores_of
from grpo_lightning.training.loop import GRPOLoop, follow, unfollow
from grpo_lightning.training.observer import Observer
from grpo_lightning.training.pace import Pace, counted, duration

SHOWN = {"explore": "explore", "reward": "reward", "logp": "log-probs", "optimise": "update"}
"""The phases of a step whose seconds are shown, and what they are called."""


class StepLines(Callback, Observer):
    """Prints one line per step: its reward, length and seconds, its validation, and the time left for the run.

    It also says why a step made fewer updates, or learned nothing.

    Phases that take less than a twentieth of the step are left out.

    `step 10/60: reward 0.91, length 14.2; explore 0.6 s, update 0.3 s; val avg@8 0.72, greedy 0.98; 1 min 05 s left`
    """

    def __init__(self) -> None:
        self._pace = Pace(0, None)
        self._scores: Scores = {}
        self._step = 0
        self._loop: GRPOLoop

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Follows the loop of the run."""
        if stage == "fit":
            self._loop = GRPOLoop.find(trainer)
            follow(trainer, self)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leaves the loop, which another trainer may use."""
        unfollow(trainer, self)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leaves the loop: Lightning calls no `teardown` now."""
        unfollow(trainer, self)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock."""
        self._step = trainer.current_epoch
        self._pace = Pace(self._step, trainer.max_epochs)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes a validation for the line of its step; one before the first step has a line of its own."""
        scores = {} if is_sanity_check(trainer) else headline(scores_of(trainer))
        if trainer.sanity_checking and scores:
            rank_zero_info(f"before training: {validation(scores)} ({measure_of(pl_module)})")
        self._scores = {} if trainer.sanity_checking else scores

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Prints the line."""
        self._step += 1
        self._pace.step_ended()
        rank_zero_info(line(self._step, self._pace, metrics, self._scores, self._loop.current_step.remarks))
        self._scores = {}


def line(step: int, pace: Pace, metrics: Mapping[str, float], scores: Scores, remarks: Sequence[str] = ()) -> str:
    """The line of a step.

    Args:
        step: From 1.
        pace: Of the run.
        metrics: Of the step.
        scores: Of its validation; empty if there was none.
        remarks: Why it learned less than it might have.
    """
    seconds = {name: metrics.get(f"time/{phase}", 0.0) for phase, name in SHOWN.items()}
    parts = [
        f"{reward(metrics)}, length {metrics['rollout/length_mean']:.1f}",
        *remarks,
        ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value > 0.05 * sum(seconds.values())),
        validation(scores),
        "" if pace.left is None or pace.done == pace.total else f"{duration(pace.left)} left",
    ]
    return f"step {counted(step, pace.total)}: " + "; ".join(part for part in parts if part)


def reward(metrics: Mapping[str, float]) -> str:
    """`reward 0.91`; `no reward` where none of the step's completions has one."""
    mean = metrics.get("reward/mean")
    return "no reward" if mean is None else f"reward {number(mean)}"


def validation(scores: Scores) -> str:
    """`val avg@8 0.72, greedy 0.98`; empty without scores."""
    return "val " + ", ".join(f"{name} {number(value)}" for name, value in scores.items()) if scores else ""


def number(value: Any) -> str:
    """Two decimals; large numbers without."""
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.4g}"
