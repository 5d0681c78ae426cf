"""Checkpoints that a killed run resumes from bit for bit, and the clean end of a run that gets a signal."""

import os
import signal
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from grpo_lightning import disk, ranks
from grpo_lightning.training import internals
from grpo_lightning.training.checkpoint_files import check_whole_step, read_checkpoint
from grpo_lightning.types import UsageError, at_least, require

SUSPENDED = 75
"""Exit code of a run that SIGUSR1 has ended and that is to be continued: EX_TEMPFAIL of sysexits.h."""
EXIT_CODE = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C has ended, by the convention of shells."""
CODES = {"Ctrl-C": EXIT_CODE, "SIGUSR1": SUSPENDED, "SIGTERM": None}
"""Exit code by the signal that ends the run; of several signals the first here counts. None: as without a signal."""


class StepCheckpoint(ModelCheckpoint):
    """Saves the run as `last.ckpt` at the end of exploration steps, where it resumes from exactly.

    Checkpoints are in `checkpoints/` of `trainer.default_root_dir`, with any logger. After SIGTERM, SIGUSR1
    or Ctrl-C the running step ends, is saved, and the run stops. A second Ctrl-C stops at once. SIGUSR1 is what a
    cluster sends some time before a job's end: the exit code then tells the job script to requeue.

    Args:
        every_n_steps: Exploration steps between two checkpoints. The last step of the run is always saved.
        keep: Number of checkpoints kept besides `last.ckpt`: the newest, or the best by `monitor`. -1 keeps all.
        monitor: Metric that decides which checkpoints are best, such as `val/greedy`; None keeps the newest.
        mode: Whether the best is the largest (`max`) or the smallest (`min`).
    """

    def __init__(
        self, every_n_steps: int = 1, keep: int = 0, monitor: str | None = None, mode: Literal["max", "min"] = "max"
    ) -> None:
        at_least("checkpoint.every_n_steps", every_n_steps, 1)
        require(keep >= -1, f"checkpoint.keep={keep}: give a number of checkpoints, or -1 for all")
        if mode == "min" and monitor is None:
            raise UsageError("checkpoint.mode=min: it has no effect without checkpoint.monitor, a metric to judge by")
        self.every_n_steps = every_n_steps
        super().__init__(
            filename="step-{epoch}",
            auto_insert_metric_name=False,
            monitor=monitor or "epoch",  # Lightning counts it among the metrics, so that the newest are the best
            mode=mode if monitor else "max",
            save_top_k=keep,
            save_last=True,
            every_n_epochs=every_n_steps,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._steps_saved = 0
        self.saved_in = ""
        """The checkpoint that holds the run so far; empty if no step has been saved."""
        self._signals: set[str] = set()

    @staticmethod
    def find(trainer: L.Trainer) -> "StepCheckpoint | None":
        """Finds the trainer's `StepCheckpoint` among its checkpoint callbacks; None if it has no such callback."""
        return next(
            (callback for callback in trainer.checkpoint_callbacks if isinstance(callback, StepCheckpoint)), None
        )

    @property
    def state_key(self) -> str:
        """The key of the callback's state, the same for all options, so that a run may continue with others."""
        return type(self).__name__

    @property
    def saved(self) -> str:
        """A sentence that says what has been saved, and how to continue from there."""
        if not self.saved_in:
            return "no step has been saved"
        name = "last" if self.saved_in == str(self._last) else self.saved_in
        return f"{self.saved_in} holds the run up to step {self._steps_saved}; continue with --ckpt_path {name}"

    @property
    def stopped_by(self) -> str:
        """The signal that ends the run, the first of CODES; empty if none has come."""
        return next((name for name in CODES if name in self._signals), "")

    @property
    def _last(self) -> Path:
        return Path(self.dirpath or "", "last.ckpt")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Chooses the folder; Lightning would take the folder of the first logger, which changes with every start."""
        self.dirpath = self.dirpath or str(checkpoints_of(trainer))
        with warnings.catch_warnings():
            # A run that continues finds its own checkpoints there.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raises UsageError if only some ranks have found `last`."""
        found_by_rank = ranks.gather(trainer.ckpt_path is not None)
        if len({*found_by_rank}) > 1:
            raise UsageError(
                f"ckpt_path=last: rank {found_by_rank.index(True)} finds last.ckpt and rank "
                f"{found_by_rank.index(False)} does not. Put trainer.default_root_dir on a disk that all nodes share"
            )

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses a folder that holds another run, before the validation of the untrained policy logs into it."""
        check_overwriting(trainer, trainer.ckpt_path)

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        """Finds `last` in the folder of the run; Lightning looks for it before `setup` has chosen the folder."""
        self.dirpath = self.dirpath or str(checkpoints_of(trainer))
        return super()._find_last_checkpoints(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the checkpoints of earlier starts, removes those beyond `keep`, and sets the handlers of signals."""
        super().on_train_start(trainer, pl_module)
        check_overwriting(trainer, trainer.ckpt_path)
        if trainer.ckpt_path is not None:
            self._steps_saved = trainer.current_epoch
            self.saved_in = str(trainer.ckpt_path)

        # Of the checkpoints that still exist, the best stay.
        present = {path: score for path, score in self.best_k_models.items() if Path(path).exists()}
        scores: dict[str, Tensor] = trainer.strategy.broadcast(present)
        best_first = sorted(scores, key=lambda path: float(scores[path]), reverse=self.mode == "max")
        if self.save_top_k >= 0 and not disk.is_trial(trainer):
            for path in best_first[self.save_top_k :]:
                internals.remove_checkpoint(self, trainer, path)
            best_first = best_first[: self.save_top_k]
        self.best_k_models = {path: scores[path] for path in best_first}
        self.best_model_path, self.kth_best_model_path = (best_first[0], best_first[-1]) if best_first else ("", "")
        self.best_model_score = scores.get(self.best_model_path)
        self.kth_value = scores.get(self.kth_best_model_path, self.kth_value)

        # Lightning's handlers would end the run within the step. After the fit Lightning restores the earlier handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        is_first = name not in self._signals
        self._signals.add(name)
        message = f"Ctrl-C again: stopped at once; {self.saved}"
        if is_first:
            message = "Ctrl-C: this step will be finished and saved; press it again to stop at once"
        if name == "Ctrl-C" and getattr(rank_zero_only, "rank", 0) in (0, None):
            # `print` cannot be used: the signal may have interrupted one.
            os.write(2, f"\n{message}\n".encode())
        if name == "Ctrl-C" and not is_first:
            raise SystemExit(EXIT_CODE)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the step, and ends the run if any rank has got a signal."""
        step = trainer.current_epoch + 1
        self._signals.update(*ranks.gather([*self._signals]))
        if self._signals:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = None
        is_due = step % self.every_n_steps == 0 or step == trainer.max_epochs or trainer.should_stop
        if is_due and not disk.is_trial(trainer):
            # The names of files count steps from 1.
            metrics = internals.monitored(self, trainer) | {"epoch": torch.tensor(step)}
            comes_later = str(self.monitor).startswith("val/") and not any(name.startswith("val/") for name in metrics)
            if self.monitor not in metrics and not comes_later:
                raise UsageError(f"checkpoint.monitor={self.monitor}: no such metric; there are {', '.join(metrics)}")
            internals.save(self, trainer, metrics)
            self._steps_saved = step
            self.saved_in = str(self._last)
        if self.stopped_by:
            rank_zero_info(f"{self.stopped_by}: {self.saved}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Does nothing: the last step is saved already, and Lightning would save a `fast_dev_run` here."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the best checkpoints, with the metric and the mode that they were chosen by."""
        return {**super().state_dict(), "mode": self.mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the best checkpoints, in the folder where the run is now.

        Checkpoints that were chosen by another metric stay on the disk, and `keep` does not count them.
        """
        scores = {
            str(self._last.with_name(Path(path).name)): score for path, score in state_dict["best_k_models"].items()
        }
        monitor = state_dict["monitor"]
        mode = state_dict.get("mode", self.mode)
        if (monitor, mode) == (self.monitor, self.mode):
            self.best_k_models = scores
        elif scores:
            rank_zero_info(
                f"checkpoint.monitor and mode were {monitor}, {mode}: the checkpoints kept so far stay, and "
                f"checkpoint.keep={self.save_top_k} counts those from now on ({', '.join(scores)})"
            )


def checkpoints_of(trainer: L.Trainer) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(trainer.default_root_dir) / "checkpoints"


def check_overwriting(trainer: L.Trainer, ckpt_path: str | Path | None) -> None:
    """Raises UsageError if the run would overwrite checkpoints of an earlier run that it does not continue."""
    folder = checkpoints_of(trainer)
    if ckpt_path is not None and ("://" in str(ckpt_path) or Path(ckpt_path).resolve().parent == folder.resolve()):
        return
    if (folder / "last.ckpt").exists():
        raise UsageError(
            f"{folder.parent} already holds a run. Continue it with ckpt_path=last, or choose another folder with "
            "trainer.default_root_dir"
        )


def checkpoint_to_read(ckpt_path: str | None, stage: str, trainer: L.Trainer, weights_only: bool | None) -> str | None:
    """Returns the checkpoint that `--ckpt_path` means; None if the run begins anew, as `fit --ckpt_path last` may.

    Raises:
        UsageError: There is no such checkpoint, or the run cannot go on from it.
    """
    if ckpt_path is None and stage == "fit" and (unasked := internals.unasked_checkpoint(trainer)):
        raise UsageError(
            f"{unasked}: Lightning, which left it when SLURM requeued a job, would go on from it, unasked. Give a "
            "ckpt_path, such as `last`, or remove the file"
        )
    if ckpt_path is None or "://" in ckpt_path:
        return ckpt_path
    # Lightning would look for `last` only in a stage that writes checkpoints.
    path = checkpoints_of(trainer) / "last.ckpt" if ckpt_path == "last" else Path(ckpt_path)
    if not path.exists():
        if ckpt_path != "last" or stage != "fit":
            raise UsageError(
                f"ckpt_path={ckpt_path}: there is no {path}. Give a path, or `last` for the newest of the run"
            )
        rank_zero_info(f"ckpt_path=last: {path} does not exist yet, so this run starts with step 1")
        return None
    # Lightning's ModelParallelStrategy writes folders.
    if path.is_dir():
        return str(path)
    checkpoint = read_checkpoint(path, mmap=True, weights_only=weights_only)
    if stage == "fit":
        check_whole_step(checkpoint, path)
        if "optimizer_states" not in checkpoint:
            raise UsageError(f"ckpt_path={path}: it holds the weights alone, without the optimizer's state")
        num_steps = checkpoint["epoch"] + 1
        max_steps = trainer.max_epochs
        if max_steps is not None and 0 <= max_steps <= num_steps:
            raise UsageError(
                f"trainer.max_epochs={max_steps}: {path} has done {num_steps} steps already; give more to go on, such "
                f"as --trainer.max_epochs {2 * num_steps}"
            )
    return str(path)
