"""Checkpoints a killed run resumes from bit for bit, and the clean end of a run that is told to stop."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning.sharding import refuse_folder
from grpo_lightning.types import UsageError


class StepCheckpoint(ModelCheckpoint):
    """Saves the run at the end of exploration steps, the only place from which it resumes exactly, as `last.ckpt`.

    SIGTERM lets the running step end, saves, and ends the run cleanly.

    Args:
        every_n_steps: Exploration steps between two checkpoints; the last step of the run is saved too.
        keep: How many older checkpoints stay beside `last.ckpt`: the newest, or the best by `monitor`; -1 keeps all.
        monitor: Metric to judge checkpoints by, such as `val/pass@1`; None keeps the newest.
        mode: Whether the best is the largest (`max`) or the smallest (`min`).
    """

    CHECKPOINT_EQUALS_CHAR = "-"

    def __init__(
        self,
        every_n_steps: int = 1,
        keep: int = 0,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if every_n_steps < 1:
            raise UsageError(f"checkpoint.every_n_steps={every_n_steps}: give 1 or more")
        if keep < -1:
            raise UsageError(f"checkpoint.keep={keep}: give a number of checkpoints, or -1 for all")
        super().__init__(
            filename="step-{epoch}",
            auto_insert_metric_name=False,
            monitor=monitor or "epoch",  # which Lightning counts among the metrics: the best are the newest
            mode=mode if monitor else "max",
            save_top_k=keep,
            save_last=True,
            every_n_epochs=every_n_steps,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._stopping = False

    @property
    def state_key(self) -> str:
        """The same whatever the options, so that a run may go on with others."""
        return type(self).__name__

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.global_step == 0 and self.dirpath is not None:
            refuse_overwriting(Path(self.dirpath))
        # Lightning's own handler would leave the epoch in the middle. Lightning puts back what was there before fit.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.strategy.reduce_boolean_decision(self._stopping, all=False):
            rank_zero_info("SIGTERM: the step is done and saved; continue with --ckpt_path last")
            trainer.should_stop = True
        step = trainer.current_epoch + 1
        due = step % self._every_n_epochs == 0 or step == trainer.max_epochs or trainer.should_stop
        if due and not self._should_skip_saving_checkpoint(trainer):
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        """Lightning's own writes `last.ckpt` only together with one of those that are kept."""
        metrics = self._monitor_candidates(trainer)
        # File names count the steps done, as everything a person sees.
        metrics["epoch"] = torch.tensor(trainer.current_epoch + 1)
        validated = any(name.startswith("val/") for name in metrics)
        if self.monitor in metrics:
            self._save_topk_checkpoint(trainer, metrics)
        elif validated or not str(self.monitor).startswith("val/"):
            raise UsageError(f"checkpoint.monitor={self.monitor}: no such metric; there are {', '.join(metrics)}")
        self._save_last_checkpoint(trainer, metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing: the last step is saved already, and Lightning would save a `fast_dev_run` here."""


def refuse_overwriting(checkpoints: Path) -> None:
    """Raises UsageError if a new run would write over the checkpoints of an earlier one."""
    if (checkpoints / "last.ckpt").exists():
        raise UsageError(
            f"{checkpoints.parent} already holds a run. Continue it with --ckpt_path last, or choose another folder "
            "with --trainer.default_root_dir"
        )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and then moves it there, so that a killed run never leaves half a file.

    Lightning's own writes to the temporary folder and moves it, which copies where that is another file system.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        refuse_folder(path)
        return super().load_checkpoint(path, *args, **kwargs)
