"""One line per step, a bar of the completions of the next one, and how fast a run goes."""

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
from grpo_lightning.training.internals import has_end
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.training.whole_steps import WholeSteps
from grpo_lightning.types import Sample

Scores = dict[str, float]  # metrics of one validation, without `val/`

SHOWN = {"wait": "wait", "explore": "explore", "reward": "reward", "logp": "log-probs", "optimise": "update"}
"""The phases of a step whose seconds are shown, and what they are called."""


class Pace:
    """Measures the steps of one start of a run. No end is known where `total` is None or negative."""

    def __init__(self, done: int, total: int | None) -> None:
        self.first = self.done = done
        self.total = total
        self._started = perf_counter()

    @property
    def left(self) -> float | None:
        """Seconds until the last step will have ended, at the mean speed so far; None if that is not known."""
        if self.done == self.first or self.total is None or not has_end(self.total):
            return None
        return (perf_counter() - self._started) / (self.done - self.first) * (self.total - self.done)


def counted(steps: int, total: int | None, between: str = "/") -> str:
    """`3/60`, or `3` for a run without a known end, where `total` is None or negative."""
    return f"{steps}{between}{total}" if has_end(total) else str(steps)


def duration(seconds: float) -> str:
    """`0:02:05`, `2 days, 5:00:00`."""
    return str(timedelta(seconds=round(seconds)))


class StepLines(Callback, Observer):
    """Prints one line per step: its reward, length and seconds, its validation, and the time left for the run.

    The first line is about the data. A line also says why a step made fewer updates, or learned nothing. Phases that
    take less than a twentieth of the step are left out.

    `step 10/60: reward 0.91, length 14.2; explore 0.6 s, update 0.3 s; val avg@8 0.72, greedy 0.98; 0:01:05 left`

    Args:
        bar: Draw a bar of the completions too, while a step is explored: for a terminal.
    """

    def __init__(self, bar: bool = False) -> None:
        self.bar = bar
        self._draws = False
        self._drawn: Any = None
        self._pace = Pace(0, None)
        self._scores: Scores = {}
        self._loop: GRPOLoop

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints what the run is asked, before anything is drawn."""
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, TaskData) and trainer.is_global_zero:
            rank_zero_info(f"data: {data_line(data)}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock."""
        self._loop, self._draws = GRPOLoop.find(trainer), self.bar and trainer.is_global_zero
        self._pace = Pace(trainer.current_epoch, trainer.max_epochs)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Notes a validation for the line of its step; one before the first step has a line of its own."""
        scores = headline(trainer)
        if trainer.sanity_checking and scores:
            rank_zero_info(f"before training: {validation(scores)} ({pl_module.measure})")
        self._scores = {} if trainer.sanity_checking else scores

    def exploring(self, num_completions: int) -> None:
        """Begins the bar."""
        self._end()
        if self._draws:
            step = counted(self._pace.done + 1, self._pace.total)
            self._drawn = tqdm(total=num_completions, desc=f"step {step} explore", leave=False, file=sys.stdout)

    def explored(self, sample: Sample) -> None:
        """Moves the bar on."""
        if self._drawn is not None:
            self._drawn.update()

    def rewarded(self, mean: float) -> None:
        """Ends the bar."""
        self._end()

    def on_exception(self, *args: Any) -> None:
        """Ends the bar, so that the next message has a line of its own."""
        self._end()

    def _end(self) -> None:
        if self._drawn is not None:
            self._drawn.close()
            self._drawn = None

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Prints the line."""
        self._pace.done += 1
        rank_zero_info(line(self._pace, metrics, self._scores, self._loop.current_step.remarks))
        self._scores = {}


def headline(trainer: L.Trainer) -> Scores:
    """avg@k, which GRPO improves most directly, of each validation that has just ended, and greedy of the main one.

    Empty where Lightning only checks that validation works (`trainer.num_sanity_val_steps`). Every rank must call it.
    """
    first = any(isinstance(one, WholeSteps) and one.validates_now for one in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.sanity_checking and not first:
        return {}
    module: Any = trainer.lightning_module
    found = {name: value for name, value in module.validated().items() if "avg@" in name or name == "greedy"}
    return {name: found[name] for name in sorted(found, key=lambda name: ("/" in name, name))}


def line(pace: Pace, metrics: Mapping[str, float], scores: Scores, remarks: Sequence[str] = ()) -> str:
    """The line of a step."""
    seconds = {name: metrics.get(f"time/{phase}", 0.0) for phase, name in SHOWN.items()}
    mean = metrics.get("reward/mean")
    parts = [
        f"{'no reward' if mean is None else f'reward {number(mean)}'}, length {metrics['rollout/length_mean']:.1f}",
        *remarks,
        ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value > 0.05 * sum(seconds.values())),
        validation(scores),
        "" if pace.left is None or pace.done == pace.total else f"{duration(pace.left)} left",
    ]
    return f"step {counted(pace.done, pace.total)}: " + "; ".join(part for part in parts if part)


def validation(scores: Scores) -> str:
    """`val avg@8 0.72, greedy 0.98`; empty without scores."""
    return "val " + ", ".join(f"{name} {number(value)}" for name, value in scores.items()) if scores else ""


def number(value: Any) -> str:
    """Two decimals; large numbers without."""
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.4g}"
