"""The progress bar: completions while a step is explored, updates while it is learned from."""

import logging
import sys
import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from grpo_lightning.training.internals import bars_of, bars_on_screen
from grpo_lightning.training.loop import GRPOLoop
from grpo_lightning.training.observer import Observer


class StepProgressBar(TQDMProgressBar, Observer):
    """One line for the run: `step 3/60 explore 128/256`, then `step 3/60 update 1/4`, with the step's mean reward.

    Args:
        refresh_rate: Updates between two drawings.
        process_position: Lines to leave free above the bar.
        leave: Keep the bar on the screen when the run has ended.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, process_position, leave)
        self._reward: float | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Follows the loop of the run."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self not in (observers := GRPOLoop.find(trainer).observers):
            observers.append(self)

    def exploring(self, num_completions: int) -> None:
        """Begins the bar of an exploration."""
        self._begin("explore", num_completions)

    def explored(self, num_completions: int) -> None:
        """Moves the bar on."""
        self.train_progress_bar.update(num_completions)

    def rewarded(self, mean: float) -> None:
        """Shows the step's mean reward."""
        self._reward = mean
        if not self.train_progress_bar.disable:
            self.train_progress_bar.set_postfix(self.get_metrics(self.trainer, self.trainer.lightning_module))

    def _begin(self, phase: str, total: int) -> None:
        bar = self.train_progress_bar
        bar.reset(total)
        bar.initial = 0
        bar.set_description(f"step {self.trainer.current_epoch + 1}/{self.trainer.max_epochs} {phase}")

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Nothing: the bar begins with the exploration."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins the bar of the updates."""
        if batch_idx == 0:
            self._begin("update", int(self.total_train_batches))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Ends the line of every bar, so that the next message has a line of its own."""
        for bar in bars_of(self):
            bar.close()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """The numbers behind the bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        # Until this step has ended, Lightning has the mean reward of the last one.
        return metrics if self._reward is None else metrics | {"reward/mean": self._reward}


class BesideBars(logging.Filter):
    """Clears the progress bars before a message is written on their line; tqdm draws them again below it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True, once the bars are cleared."""
        clear_bars()
        return True


def clear_bars() -> None:
    """Takes all progress bars off the screen until they are drawn again."""
    for bar in bars_on_screen():
        bar.clear()
    sys.stdout.flush()


def keep_messages_off_bars() -> None:
    """Gives log messages and warnings their own lines. The second call does nothing."""
    # The root logger writes the warnings of rewards, or the last resort where it has no handler.
    named = [logging.getLogger(name).handlers for name in ("lightning.pytorch", "lightning.fabric", "")]
    for handler in [logging.lastResort, *(handler for handlers in named for handler in handlers)]:
        if handler is not None and not any(isinstance(other, BesideBars) for other in handler.filters):
            handler.addFilter(BesideBars())
    show = warnings.showwarning
    if getattr(show, "beside_bars", False):
        return

    def beside_bars(*args: Any, **kwargs: Any) -> None:
        clear_bars()
        show(*args, **kwargs)

    beside_bars.beside_bars = True  # type: ignore[attr-defined]
    warnings.showwarning = beside_bars
