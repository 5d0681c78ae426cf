"""Checkpoints a killed run resumes from bit for bit, and the clean end of a run that is told to stop."""

import warnings
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.training import disk, internals
from grpo_lightning.training.callbacks.interrupts import Interrupts
from grpo_lightning.training.checkpoint_files import AtomicCheckpointIO as AtomicCheckpointIO
from grpo_lightning.types import UsageError, at_least


class StepCheckpoint(ModelCheckpoint):
    """Saves the run as `last.ckpt` at the end of exploration steps, where it resumes from exactly.

    Checkpoints are in `checkpoints/` of `trainer.default_root_dir`, whatever the logger. After SIGTERM, SIGUSR1
    or Ctrl-C the running step ends, is saved, and the run stops. A second Ctrl-C stops at once.

    Args:
        every_n_steps: Exploration steps between two checkpoints. The last step of the run is always saved.
        keep: Number of checkpoints kept besides `last.ckpt`: the newest, or the best by `monitor`. -1 keeps all.
        monitor: Metric to judge checkpoints by, such as `val/greedy`; None keeps the newest.
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
        at_least("checkpoint.every_n_steps", every_n_steps, 1)
        if keep < -1:
            raise UsageError(f"checkpoint.keep={keep}: give a number of checkpoints, or -1 for all")
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
        self._saved_in = Path()
        self.interrupts = Interrupts(lambda: self.saved)

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
        if not self._steps_saved:
            return "no step has been saved"
        is_last = self._saved_in == self._last
        return (
            f"{self._saved_in} holds the run up to step {self._steps_saved}; continue with --ckpt_path "
            f"{'last' if is_last else self._saved_in}"
        )

    @property
    def saved_in(self) -> str:
        """The checkpoint that holds the run so far; empty if no step has been saved."""
        return str(self._saved_in) if self._steps_saved else ""

    @property
    def _last(self) -> Path:
        assert self.dirpath is not None
        return Path(self.dirpath) / "last.ckpt"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Chooses the folder."""
        self._settle(trainer)
        with warnings.catch_warnings():
            # A run that continues finds its own checkpoints there; those of another run are refused.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        refuse_other_starts(trainer.ckpt_path is not None)

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        """Lightning looks for `last` before `setup`."""
        self._settle(trainer)
        return super()._find_last_checkpoints(trainer)

    def _settle(self, trainer: L.Trainer) -> None:
        # Lightning would take the folder of the first logger, which is another one in every start.
        if self.dirpath is None:
            self.dirpath = str(checkpoints_of(trainer))

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses a folder that holds another run, before the validation that comes first logs into it."""
        self._refuse_another_run(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses a folder that holds another run, and begins to listen for signals."""
        super().on_train_start(trainer, pl_module)
        self._refuse_another_run(trainer)
        if trainer.ckpt_path is not None:
            self._steps_saved, self._saved_in = trainer.current_epoch, Path(trainer.ckpt_path)
        there = {path: score for path, score in self.best_k_models.items() if Path(path).exists()}
        self._rank(trainer.strategy.broadcast(there))
        # Lightning's own handlers would leave the step in the middle.
        self.interrupts.listen()

    def _refuse_another_run(self, trainer: L.Trainer) -> None:
        is_own = (
            trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve().parent == self._last.parent.resolve()
        )
        if not is_own:
            refuse_overwriting(self._last.parent)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the step, and ends the run if it was asked to."""
        step = trainer.current_epoch + 1
        stops = self.interrupts.agree(lambda one: trainer.strategy.reduce_boolean_decision(one, all=False))
        if stops:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = None
        due = step % self.every_n_steps == 0 or step == trainer.max_epochs or trainer.should_stop
        if due and not disk.is_trial(trainer):
            self._save(trainer)
        if stops:
            rank_zero_info(f"{self.interrupts.name}: {self.saved}")

    def _save(self, trainer: L.Trainer) -> None:
        """Saves. Lightning itself writes `last.ckpt` only together with one of those that are kept."""
        metrics = internals.monitored(self, trainer)
        # File names count the steps done, from 1.
        metrics["epoch"] = torch.tensor(trainer.current_epoch + 1)
        validated = any(name.startswith("val/") for name in metrics)
        surplus = self._surplus()
        if self.monitor in metrics:
            internals.save_best(self, trainer, metrics)
        elif validated or not str(self.monitor).startswith("val/"):
            raise UsageError(f"checkpoint.monitor={self.monitor}: no such metric; there are {', '.join(metrics)}")
        internals.save_last(self, trainer, metrics)
        self._steps_saved, self._saved_in = trainer.current_epoch + 1, self._last
        for path in surplus:
            internals.remove_checkpoint(self, trainer, path)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing: the last step is saved already, and Lightning would save a `fast_dev_run` here."""

    def state_dict(self) -> dict[str, Any]:
        """The checkpoints that are kept, and how they were judged."""
        return {**super().state_dict(), "mode": self.mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the checkpoints that were kept, wherever the run's folder is now.

        Those judged by another metric stay, but no longer count towards `keep`.
        """
        kept = {
            str(self._last.with_name(Path(path).name)): score for path, score in state_dict["best_k_models"].items()
        }
        before = state_dict["monitor"], state_dict.get("mode", self.mode)
        # A run that continues in another folder takes nothing over.
        kept = {path: score for path, score in kept.items() if Path(path).exists()}
        if before == (self.monitor, self.mode):
            self._rank(kept)
        elif kept:
            rank_zero_info(
                f"checkpoint.monitor and mode were {before[0]}, {before[1]}: the checkpoints kept so far stay, and "
                f"checkpoint.keep={self.save_top_k} counts those from now on ({', '.join(kept)})"
            )

    def _rank(self, kept: dict[str, Tensor]) -> None:
        """Makes `kept` the checkpoints that later ones are compared with."""
        best_first = sorted(kept, key=lambda path: float(kept[path]), reverse=self.mode == "max")
        self.best_k_models = kept
        self.best_model_path, self.kth_best_model_path = (best_first[0], best_first[-1]) if kept else ("", "")
        self.best_model_score = kept.get(self.best_model_path)
        self.kth_value = kept.get(self.kth_best_model_path, self.kth_value)

    def _surplus(self) -> list[str]:
        """Returns, and forgets, the worst checkpoints beyond `keep`, left by a run with a larger one."""
        if self.save_top_k < 0:
            return []
        scores = self.best_k_models
        best_first = sorted(scores, key=lambda path: float(scores[path]), reverse=self.mode == "max")
        if surplus := best_first[self.save_top_k :]:
            self._rank({path: scores[path] for path in best_first[: self.save_top_k]})
        return surplus


def checkpoints_of(trainer: L.Trainer) -> Path:
    """The folder of a run's checkpoints."""
    return Path(trainer.default_root_dir) / "checkpoints"


def refuse_other_starts(continues: bool) -> None:
    """Raises UsageError if `--ckpt_path last` found a checkpoint on some ranks alone. Every rank must call it."""
    everyone = ranks.gather(continues)
    if len({*everyone}) > 1:
        without = everyone.index(False)
        raise UsageError(
            f"ckpt_path=last: rank {everyone.index(True)} finds last.ckpt and rank {without} does not. Put "
            "trainer.default_root_dir on a disk that all nodes share"
        )


def refuse_overwriting(checkpoints: Path) -> None:
    """Raises UsageError if a new run would write over the checkpoints of an earlier one."""
    if (checkpoints / "last.ckpt").exists():
        raise UsageError(
            f"{checkpoints.parent} already holds a run. Continue it with --ckpt_path last, or choose another folder "
            "with --trainer.default_root_dir"
        )
