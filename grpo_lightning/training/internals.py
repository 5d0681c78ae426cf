"""Wraps every private name of Lightning and TensorBoard that training and the command line use.

Each has a function with the reason. All were checked on Lightning 2.6. A test finds private names in other files.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

OVERRIDDEN: Mapping[type, tuple[str, ...]] = {
    # Lightning looks for `last.ckpt` before `setup`, when the callback does not know its folder yet.
    ModelCheckpoint: ("_find_last_checkpoints",),
    # Lightning would read the whole checkpoint to look for options, and end an interrupted program with exit code 1.
    LightningCLI: ("_parse_ckpt_path", "_run_subcommand"),
    # The writer of `metrics.csv`; Lightning would delete an existing file.
    CSVLogger: ("_experiment",),
}
"""Private methods and attributes that classes of this package replace."""


def has_end(steps: int | None) -> bool:
    """True if a run ends after `steps` steps (`trainer.max_epochs`): None and -1 set no end."""
    return steps is not None and steps >= 0


@contextmanager
def replaced(instance: Any, **values: Any) -> Iterator[None]:
    """Returns a context in which attributes of `instance` have other values."""
    previous = {name: getattr(instance, name) for name in values}
    try:
        for name, value in values.items():
            setattr(instance, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(instance, name, value)


def validating_first(trainer: L.Trainer) -> AbstractContextManager[None]:
    """Returns a context in which Lightning validates before the first step.

    Lightning's sanity check with all batches is this validation. Unlike `trainer.validate` within a fit, it leaves the
    random numbers as they are, and no callback counts it as a validation of the run.
    """
    return replaced(trainer, num_sanity_val_steps=math.inf)


def log_at_step(trainer: L.Trainer) -> None:
    """Makes Lightning and its monitors log at the exploration step; they would log at the number of updates."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.current_epoch


def write(trainer: L.Trainer, metrics: Mapping[str, Tensor], step: int) -> None:
    """Writes metrics of an exploration step to every logger, and to the disk."""
    values = {name: float(value) for name, value in metrics.items()} | {"epoch": float(step)}
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)
        logger.save()


@contextmanager
def standing(trainer: L.Trainer, step: int | None) -> Iterator[None]:
    """Returns a context in which `validate` logs at `step`; None: at the last step that this trainer has done.

    Lightning would log at the next step.
    """
    progress = trainer.fit_loop.epoch_progress.current
    if step is None:
        step = progress.completed - 1
    with replaced(trainer.fit_loop.epoch_loop, _batches_that_stepped=step), replaced(progress, completed=step):
        yield


def summary_writer(logger: TensorBoardLogger) -> Any:
    """Returns TensorBoard's file writer: the public `add_hparams` would write into another folder."""
    return logger.experiment._get_file_writer()


def event_file(logger: TensorBoardLogger) -> Path:
    """Returns the file that TensorBoard's writer writes to."""
    return Path(summary_writer(logger).event_writer._file_name)


def without_callback(cli: LightningCLI, key: str) -> None:
    """Removes a callback that the command line always adds, for the run that begins."""
    cli._parser(cli.subcommand).callback_keys.remove(key)


def monitored(checkpoint: ModelCheckpoint, trainer: L.Trainer) -> dict[str, Tensor]:
    """Returns the metrics that a checkpoint can monitor, with `epoch` and `step`."""
    return checkpoint._monitor_candidates(trainer)


def save(checkpoint: ModelCheckpoint, trainer: L.Trainer, metrics: dict[str, Tensor]) -> None:
    """Saves `last.ckpt`, and the step among the best if it is. Lightning would write the first only with the second."""
    if checkpoint.monitor in metrics:
        checkpoint._save_topk_checkpoint(trainer, metrics)
    checkpoint._save_last_checkpoint(trainer, metrics)


def remove_checkpoint(checkpoint: ModelCheckpoint, trainer: L.Trainer, path: str) -> None:
    """Removes a checkpoint, unless it is of another run."""
    if checkpoint._should_remove_checkpoint(trainer, path, current=""):
        checkpoint._remove_checkpoint(trainer, path)


def unasked_checkpoint(trainer: L.Trainer) -> str | None:
    """Finds the checkpoint that Lightning saves when SLURM requeues a job, and resumes from without `ckpt_path`."""
    return trainer._checkpoint_connector._hpc_resume_path if SLURMEnvironment.detect() else None


def start_method(strategy: Any) -> str:
    """Returns how a strategy starts its processes: `popen` starts the program again; empty if it starts none."""
    return str(getattr(strategy, "_start_method", ""))


def saves_in_steps(checkpoint: ModelCheckpoint) -> bool:
    """True if the callback saves between updates, by their number or by time."""
    return checkpoint._every_n_train_steps > 0 or checkpoint._train_time_interval is not None


def saves_at_validation(checkpoint: ModelCheckpoint, trainer: L.Trainer) -> bool:
    """True if the callback would save at the end of a validation, when the step has not ended."""
    return not checkpoint._should_save_on_train_epoch_end(trainer)


def save_after_steps(checkpoints: Sequence[ModelCheckpoint], saves: bool) -> None:
    """Makes checkpoint callbacks save at the end of a step (`saves`), or at the end of its validation."""
    for checkpoint in checkpoints:
        checkpoint._save_on_train_epoch_end = saves


def averages(trainer: Any) -> dict[WeightAveraging, AveragedModel | None]:
    """Returns the average of each callback that averages the weights; None if it has not begun."""
    return {
        callback: callback._average_model for callback in trainer.callbacks if isinstance(callback, WeightAveraging)
    }
