"""Checkpoints a killed run resumes from bit for bit, and the clean end of a run that is told to stop."""

import os
import signal
import threading
import warnings
from functools import partial
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

SUSPENDED = 75  # exit code of a run that SIGUSR1 has ended: to be continued. EX_TEMPFAIL of sysexits.h.
EXIT_CODE = 128 + signal.SIGINT  # the exit code that a shell expects of a program that Ctrl-C has ended
CODES = {"Ctrl-C": EXIT_CODE, "SIGUSR1": SUSPENDED, "SIGTERM": None}
"""What asks a run to stop, the first counts, and the exit code then; None is that of any run that ends well."""


class StepCheckpoint(ModelCheckpoint):
    """Saves the run as `last.ckpt` at the end of exploration steps, where it resumes from exactly.

    Checkpoints are in `checkpoints/` of `trainer.default_root_dir`, whatever the logger. After SIGTERM, SIGUSR1
    or Ctrl-C the running step ends, is saved, and the run stops. A second Ctrl-C stops at once. SIGUSR1 is what a
    cluster sends some time before a job's end: the exit code then tells the job script to requeue.

    Args:
        every_n_steps: Exploration steps between two checkpoints. The last step of the run is always saved.
        keep: Number of checkpoints kept besides `last.ckpt`: the newest, or the best by `monitor`. -1 keeps all.
        monitor: Metric to judge checkpoints by, such as `val/greedy`; None keeps the newest.
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
            monitor=monitor or "epoch",  # which Lightning counts among the metrics: the best are the newest
            mode=mode if monitor else "max",
            save_top_k=keep,
            save_last=True,
            every_n_epochs=every_n_steps,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._steps_saved = 0
        self.saved_in = ""  # the checkpoint that holds the run so far; empty if no step has been saved
        self._heard: set[str] = set()

    @staticmethod
    def find(trainer: L.Trainer) -> "StepCheckpoint | None":
        """That of the trainer, whatever other checkpoint callbacks it has; None if it has none."""
        return next((one for one in trainer.checkpoint_callbacks if isinstance(one, StepCheckpoint)), None)

    @property
    def state_key(self) -> str:
        """The same for all options, so that a run may continue with others."""
        return type(self).__name__

    @property
    def saved(self) -> str:
        """What is saved by now, and how to continue from there."""
        if not self.saved_in:
            return "no step has been saved"
        name = "last" if self.saved_in == str(self._last) else self.saved_in
        return f"{self.saved_in} holds the run up to step {self._steps_saved}; continue with --ckpt_path {name}"

    @property
    def stopped_by(self) -> str:
        """The first of CODES that has asked the run to stop; empty if nothing has."""
        return next((name for name in CODES if name in self._heard), "")

    @property
    def _last(self) -> Path:
        return Path(self.dirpath or "", "last.ckpt")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Chooses the folder; Lightning would take that of the first logger, which is another one in every start."""
        self.dirpath = self.dirpath or str(checkpoints_of(trainer))
        with warnings.catch_warnings():
            # A run that continues finds its own checkpoints there.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses to begin where `last` was found on some ranks alone."""
        everyone = ranks.gather(trainer.ckpt_path is not None)
        if len({*everyone}) > 1:
            raise UsageError(
                f"ckpt_path=last: rank {everyone.index(True)} finds last.ckpt and rank {everyone.index(False)} does "
                "not. Put trainer.default_root_dir on a disk that all nodes share"
            )

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses a folder that holds another run, before the validation that comes first logs into it."""
        check_overwriting(trainer, trainer.ckpt_path)

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        """Lightning looks for `last` before `setup`."""
        self.dirpath = self.dirpath or str(checkpoints_of(trainer))
        return super()._find_last_checkpoints(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds what earlier starts have kept, removes what `keep` now leaves out, and begins to listen for signals."""
        super().on_train_start(trainer, pl_module)
        check_overwriting(trainer, trainer.ckpt_path)
        if trainer.ckpt_path is not None:
            self._steps_saved, self.saved_in = trainer.current_epoch, str(trainer.ckpt_path)
        there = {path: score for path, score in self.best_k_models.items() if Path(path).exists()}
        kept: dict[str, Tensor] = trainer.strategy.broadcast(there)
        order = sorted(kept, key=lambda path: float(kept[path]), reverse=self.mode == "max")
        most = len(order) if self.save_top_k < 0 or disk.is_trial(trainer) else self.save_top_k
        best_first, surplus = order[:most], order[most:]
        self.best_k_models = {path: kept[path] for path in best_first}
        self.best_model_path, self.kth_best_model_path = (best_first[0], best_first[-1]) if best_first else ("", "")
        self.best_model_score = kept.get(self.best_model_path)
        self.kth_value = kept.get(self.kth_best_model_path, self.kth_value)
        for path in surplus:
            internals.remove_checkpoint(self, trainer, path)
        # Lightning's own handlers would leave the step in the middle. After the fit it restores the earlier ones.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        is_first = name not in self._heard
        self._heard.add(name)
        message = f"Ctrl-C again: stopped at once; {self.saved}"
        if is_first:
            message = "Ctrl-C: this step will be finished and saved; press it again to stop at once"
        if name == "Ctrl-C" and getattr(rank_zero_only, "rank", 0) in (0, None):
            os.write(2, f"\n{message}\n".encode())  # `print` cannot be used: it may be what was interrupted
        if name == "Ctrl-C" and not is_first:
            raise SystemExit(EXIT_CODE)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the step, and ends the run if it was asked to."""
        step, anyone = trainer.current_epoch + 1, partial(trainer.strategy.reduce_boolean_decision, all=False)
        if anyone(bool(self._heard)):
            self._heard |= {name for name in CODES if anyone(name in self._heard)}
            trainer.should_stop, trainer.fit_loop.min_epochs = True, None
        due = step % self.every_n_steps == 0 or step == trainer.max_epochs or trainer.should_stop
        if due and not disk.is_trial(trainer):
            metrics = internals.monitored(self, trainer) | {"epoch": torch.tensor(step)}  # file names count from 1
            comes_later = str(self.monitor).startswith("val/") and not any(name.startswith("val/") for name in metrics)
            if self.monitor not in metrics and not comes_later:
                raise UsageError(f"checkpoint.monitor={self.monitor}: no such metric; there are {', '.join(metrics)}")
            internals.save(self, trainer, metrics)
            self._steps_saved, self.saved_in = step, str(self._last)
        if self.stopped_by:
            rank_zero_info(f"{self.stopped_by}: {self.saved}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing: the last step is saved already, and Lightning would save a `fast_dev_run` here."""

    def state_dict(self) -> dict[str, Any]:
        """The checkpoints that are kept, and how they were judged."""
        return {**super().state_dict(), "mode": self.mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the checkpoints that were kept, wherever the folder is now; those judged otherwise just stay."""
        scores = state_dict["best_k_models"].items()
        kept = {str(self._last.with_name(Path(path).name)): score for path, score in scores}
        before = state_dict["monitor"], state_dict.get("mode", self.mode)
        if before == (self.monitor, self.mode):
            self.best_k_models = kept
        elif kept:
            rank_zero_info(
                f"checkpoint.monitor and mode were {before[0]}, {before[1]}: the checkpoints kept so far stay, and "
                f"checkpoint.keep={self.save_top_k} counts those from now on ({', '.join(kept)})"
            )


def checkpoints_of(trainer: L.Trainer) -> Path:
    """The folder of a run's checkpoints."""
    return Path(trainer.default_root_dir) / "checkpoints"


def check_overwriting(trainer: L.Trainer, ckpt_path: str | Path | None) -> None:
    """Raises UsageError if a run that does not go on from `ckpt_path` would write over an earlier run's checkpoints."""
    folder = checkpoints_of(trainer)
    is_own = ckpt_path is not None and ("://" in str(ckpt_path) or Path(ckpt_path).resolve().parent == folder.resolve())
    if not is_own and (folder / "last.ckpt").exists():
        raise UsageError(
            f"{folder.parent} already holds a run. Continue it with ckpt_path=last, or choose another folder with "
            "trainer.default_root_dir"
        )


def checkpoint_to_read(given: str | None, stage: str, trainer: L.Trainer, weights_only: bool | None) -> str | None:
    """The checkpoint that `--ckpt_path` means; None for a run that begins anew, as `fit --ckpt_path last` may."""
    if given is None and stage == "fit" and (unasked := internals.unasked_checkpoint(trainer)):
        raise UsageError(
            f"{unasked}: Lightning, which left it when SLURM requeued a job, would go on from it, unasked. Give a "
            "ckpt_path, such as `last`, or remove the file"
        )
    if given is None or "://" in given:
        return given
    # Lightning looks for `last` only where checkpoints are written.
    path = checkpoints_of(trainer) / "last.ckpt" if given == "last" else Path(given)
    if not path.exists():
        if given != "last" or stage != "fit":
            raise UsageError(f"ckpt_path={given}: there is no {path}. Give a path, or `last` for the newest of the run")
        rank_zero_info(f"ckpt_path=last: {path} does not exist yet, so this run starts with step 1")
        return None
    if path.is_dir():  # of Lightning's ModelParallelStrategy
        return str(path)
    checkpoint = read_checkpoint(path, mmap=True, weights_only=weights_only)
    if stage == "fit":
        check_whole_step(checkpoint, path)
        done, steps = checkpoint["epoch"] + 1, trainer.max_epochs
        if "optimizer_states" not in checkpoint:
            raise UsageError(f"ckpt_path={path}: it holds the weights alone, without the optimizer's state")
        if steps is not None and 0 <= steps <= done:
            raise UsageError(
                f"trainer.max_epochs={steps}: {path} has done {done} steps already; give more to go on, such as "
                f"--trainer.max_epochs {2 * done}"
            )
    return str(path)
