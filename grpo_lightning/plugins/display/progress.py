"""The progress bar: completions while a step is explored, updates while it is learned from."""

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lightning.grpo.step import Observer
from grpo_lightning.plugins.display.internals import bars_of, bars_on_screen
from grpo_lightning.plugins.display.lines import Pace, Scores, counted, duration, headline
from grpo_lightning.types import Sample


class StepProgressBar(TQDMProgressBar, Observer):
    """One line for the run: `step 3/60 explore 128/256`, then `update 1/4` and `validate 2/8`.

    Behind it stand the step's mean reward as soon as it is known, the last validation, and the time left for the run.

    Args:
        refresh_rate: Updates between two drawings.
        process_position: Lines to leave free above the bar.
        leave: Keep the bar on the screen when the run has ended.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, process_position, leave)
        self._reward: dict[str, float] = {}
        self._scores: Scores = {}
        self._pace = Pace(0, None)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Log messages and warnings get lines of their own, once for all."""
        super().setup(trainer, pl_module, stage)
        # The root logger writes the warnings of rewards, or the last resort where it has no handler.
        named = [logging.getLogger(name).handlers for name in ("lightning.pytorch", "lightning.fabric", "")]
        for handler in [logging.lastResort, *(handler for handlers in named for handler in handlers)]:
            if handler is not None:
                handler.addFilter(clear_bars)
        if not isinstance(warnings.showwarning, partial):
            warnings.showwarning = partial(show_below_bars, warnings.showwarning)

    def exploring(self, num_completions: int) -> None:
        """Begins the bar of an exploration."""
        self._begin("explore", num_completions)
        self._show_numbers()

    def explored(self, sample: Sample) -> None:
        """Moves the bar on."""
        self.train_progress_bar.update(1)

    def rewarded(self, mean: float) -> None:
        """Shows the step's mean reward."""
        self._reward = {"reward/mean": mean}
        self._show_numbers()

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Counts the step."""
        self._pace.step_ended()

    def _begin(self, phase: str, total: int) -> None:
        bar, trainer = self.train_progress_bar, self.trainer
        bar.reset(total)
        bar.initial = 0
        step = f"step {counted(trainer.current_epoch + 1, trainer.max_epochs)}"
        bar.set_description(f"{'before training' if trainer.sanity_checking else step} {phase}")

    def _show_numbers(self) -> None:
        if not self.train_progress_bar.disable:
            self.train_progress_bar.set_postfix(self.get_metrics(self.trainer, self.trainer.lightning_module))

    def on_sanity_check_start(self, *args: Any) -> None:
        """Makes the bar: validation comes before the first step."""
        self.train_progress_bar = self.init_train_tqdm()

    def on_sanity_check_end(self, *args: Any) -> None:
        """Nothing: the bar stays for the training."""

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Makes the bar, and starts the clock."""
        if all(bar.disable for bar in bars_of(self)):
            self.train_progress_bar = self.init_train_tqdm()
        self._pace = Pace(trainer.current_epoch, trainer.max_epochs)

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Shows the reward of the last step as such; the bar begins with the exploration."""
        if self._reward:
            self._reward = {"last reward": next(iter(self._reward.values()))}

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins the bar of a validation; `grpo validate` has Lightning's."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().on_validation_start(trainer, pl_module)

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Sets how many batches there will be."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().on_validation_batch_start(trainer, *args, **kwargs)
        elif self.has_dataloader_changed(0):
            self._begin("validate", int(self.total_val_batches_current_dataloader))

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Moves the bar on."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().on_validation_batch_end(trainer, *args, **kwargs)
        else:
            self.train_progress_bar.update()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Shows what was found."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().on_validation_end(trainer, pl_module)
            return
        self.reset_dataloader_idx_tracker()
        self._scores = headline(trainer)
        self._show_numbers()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins the bar of the updates."""
        if batch_idx == 0:
            self._begin("update", int(self.total_train_batches))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Ends the line of every bar, so that the next message has a line of its own."""
        super().on_exception(trainer, pl_module, exception)
        for bar in bars_of(self):
            bar.close()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """The numbers behind the bar."""
        metrics = super().get_metrics(trainer, pl_module)
        # Lightning has the mean reward of the last step until this one has ended.
        for name in ("v_num", "reward/mean"):
            metrics.pop(name, None)
        metrics |= self._reward | {f"val/{name}": value for name, value in self._scores.items()}
        left = self._pace.left
        return metrics if left is None else metrics | {"left": duration(left)}


def clear_bars(*_: Any) -> bool:
    """True, once all progress bars are off the screen: tqdm draws them again below the next message."""
    for bar in bars_on_screen():
        bar.clear()
    sys.stdout.flush()
    return True


def show_below_bars(show: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Shows a warning by `show`, with the bars off the screen."""
    clear_bars()
    show(*args, **kwargs)
