"""The progress bar: completions while a step is explored, updates while it is learned from."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class StepProgressBar(TQDMProgressBar):
    """One line for the run: `step 3/60 explore 128/256`, then `step 3/60 update 1/4`, with the last mean reward."""

    def start_exploring(self, num_completions: int) -> None:
        """The step's exploration begins."""
        self._begin("explore", num_completions)

    def explored(self, num_completions: int) -> None:
        """So many more completions have ended."""
        self.train_progress_bar.update(num_completions)

    def _begin(self, phase: str, total: int) -> None:
        bar = self.train_progress_bar
        bar.reset(total)
        bar.initial = 0
        bar.set_description(f"step {self.trainer.current_epoch + 1}/{self.trainer.max_epochs} {phase}")

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Nothing yet: the loop starts the bar when it explores."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self._begin("update", int(self.total_train_batches))

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
