"""One line per step, a bar of the next step's completions, and the pace of a run."""

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from tqdm.auto import tqdm

from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.grpo.step import Observer
from grpo_lightning.plugins.console.display.data_line import data_line
from grpo_lightning.plugins.looking.loggers.validation_values import is_validation
from grpo_lightning.training.evaluation import Measurement, with_questions
from grpo_lightning.training.internals import has_end
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import Sample

Scores = Mapping[str, Measurement]
"""Metrics of a validation, by their names without `val/`."""

SHOWN = {"wait": "wait", "explore": "explore", "reward": "reward", "logp": "log-probs", "optimise": "update"}
"""The phases of a step whose seconds are shown, and their names in the line."""


class Pace:
    """Measures the speed of a run since its last start.

    Args:
        num_done: Steps that the run has done before.
        total: Steps of the run; None or negative where no end is known.
    """

    def __init__(self, num_done: int, total: int | None) -> None:
        self.num_done_before = self.num_done = num_done
        self.total = total
        self._started = perf_counter()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step will have ended, at the mean speed so far; None if unknown."""
        num_timed = self.num_done - self.num_done_before
        if not num_timed or self.total is None or not has_end(self.total):
            return None
        return (perf_counter() - self._started) / num_timed * (self.total - self.num_done)


def counted(steps: int, total: int | None, separator: str = "/") -> str:
    """Returns `3/60`, or `3` for a run without a known end, where `total` is None or negative."""
    return f"{steps}{separator}{total}" if has_end(total) else str(steps)


def duration(seconds: float) -> str:
    """Formats seconds as `0:02:05` or `2 days, 5:00:00`."""
    return str(timedelta(seconds=round(seconds)))


class StepLines(Callback, Observer):
    """Prints one line per step: its reward, length and seconds, its validation, and the time left for the run.

    The first line describes the data. A step's line also says why the step made fewer updates, or learned nothing.
    Phases that take less than a twentieth of the step are left out.

    `step 10/60: reward 0.91, length 14.2; explore 0.6 s, update 0.3 s; val avg@8 0.72 ± 0.03; 0:01:05 left`

    Args:
        bar: Show a bar of the completions too, while a step is explored: for a terminal.
    """

    def __init__(self, bar: bool = False) -> None:
        self.bar = bar
        self._has_bar = False
        self._bar: Any = None
        self._pace = Pace(0, None)
        self._scores: Scores = {}
        self._loop: GRPOLoop

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints the line about the data, before anything is sampled."""
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, TaskData) and trainer.is_global_zero:
            rank_zero_info(f"data: {data_line(data)}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock."""
        self._loop = GRPOLoop.find(trainer)
        self._has_bar = self.bar and trainer.is_global_zero
        self._pace = Pace(trainer.current_epoch, trainer.max_epochs)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Notes a validation for the line of its step; a validation before the first step gets a separate line."""
        scores = headline(trainer)
        if trainer.sanity_checking and scores:
            rank_zero_info(f"before training: val {with_questions(scores)}: {pl_module.measure}")
        self._scores = {} if trainer.sanity_checking else scores

    def exploring(self, num_completions: int) -> None:
        """Begins the bar."""
        self._end()
        if self._has_bar:
            step = counted(self._pace.num_done + 1, self._pace.total)
            self._bar = tqdm(total=num_completions, desc=f"step {step} explore", leave=False, file=sys.stdout)

    def explored(self, sample: Sample) -> None:
        """Moves the bar on."""
        if self._bar is not None:
            self._bar.update()

    def rewarded(self, mean: float) -> None:
        """Ends the bar."""
        self._end()

    def on_exception(self, *args: Any) -> None:
        """Ends the bar, so that the next message begins on a new line."""
        self._end()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Prints the line of the step."""
        self._pace.num_done += 1
        rank_zero_info(line(self._pace, metrics, self._scores, self._loop.current_step.remarks))
        self._scores = {}


def headline(trainer: L.Trainer) -> Scores:
    """Returns avg@k of all validations that have just ended, and greedy of the main validation, which comes first.

    avg@k is what GRPO improves most directly. There is nothing where Lightning only checks that validation works
    (`trainer.num_sanity_val_steps`). Every rank must call it.
    """
    if not is_validation(trainer):
        return {}
    module: Any = trainer.lightning_module
    scores = {name: score for name, score in module.measurements().items() if "avg@" in name or name == "greedy"}
    return {name: scores[name] for name in sorted(scores, key=lambda name: ("/" in name, name))}


def line(pace: Pace, metrics: Mapping[str, float], scores: Scores, remarks: Sequence[str] = ()) -> str:
    """Returns the line of a step.

    Args:
        pace: Counts the step already.
        metrics: Metrics of the step.
        scores: Scores of the validation after the step, if any.
        remarks: Why the step made fewer updates, or learned nothing.
    """
    seconds = {name: metrics.get(f"time/{phase}", 0.0) for phase, name in SHOWN.items()}
    mean = metrics.get("reward/mean")
    left = pace.seconds_left
    clauses = [
        f"{'no reward' if mean is None else f'reward {number(mean)}'}, length {metrics['rollout/length_mean']:.1f}",
        *remarks,
        ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value > 0.05 * sum(seconds.values())),
        validation(scores),
        "" if left is None or pace.num_done == pace.total else f"{duration(left)} left",
    ]
    return f"step {counted(pace.num_done, pace.total)}: " + "; ".join(filter(None, clauses))


def validation(scores: Scores) -> str:
    """Returns `val avg@8 0.72 ± 0.03, greedy 0.98 ± 0.02`; empty without scores."""
    return "val " + ", ".join(f"{name} {score}" for name, score in scores.items()) if scores else ""


def number(value: Any) -> str:
    """Formats a number with two decimals, large numbers without."""
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.4g}"
