"""Every private part of Lightning and TensorBoard that training and the command line rely on.

One function per trick, with the reason for it. All were checked on Lightning 2.6. A test finds any that is
used elsewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    # Lightning reads the whole checkpoint to look for options; and ends an interrupted program with exit code 1.
    LightningCLI: ("_parse_ckpt_path", "_run_subcommand"),
    # The writer of a file that Lightning would delete.
    CSVLogger: ("_experiment",),
}
"""Private methods and attributes that classes of this package replace."""


def has_end(steps: int | None) -> bool:
    """Whether a run ends after `trainer.max_epochs`: None and -1 set no end."""
    return steps is not None and steps >= 0


@contextmanager
def replaced(thing: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of `thing` have other values."""
    before = {name: getattr(thing, name) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


def log_at_step(trainer: L.Trainer) -> None:
    """Lets all that is logged stand at the running step; Lightning and its monitors count updates, made or not."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.current_epoch


def write(trainer: L.Trainer, metrics: Mapping[str, Tensor], step: int) -> None:
    """Writes metrics of an exploration step to every logger, and to the disk."""
    values = {name: float(value) for name, value in metrics.items()} | {"epoch": float(step)}
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)
        logger.save()


@contextmanager
def standing(trainer: L.Trainer, step: int | None) -> Iterator[None]:
    """Lets `validate` log at `step`, by default at the last that this trainer has done: Lightning would at the next."""
    updates, progress = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    at = progress.completed - 1 if step is None else step
    with replaced(updates, _batches_that_stepped=at), replaced(progress, completed=at):
        yield


def summary_writer(logger: TensorBoardLogger) -> Any:
    """TensorBoard's file writer: the public `add_hparams` would write into a folder of its own."""
    return logger.experiment._get_file_writer()


def event_file(logger: TensorBoardLogger) -> Path:
    """The file that TensorBoard's writer writes to."""
    return Path(summary_writer(logger).event_writer._file_name)


def without_callback(cli: LightningCLI, key: str) -> None:
    """Takes a callback that the command line always adds out of the one run that is about to be made."""
    cli._parser(cli.subcommand).callback_keys.remove(key)


def monitored(checkpoint: ModelCheckpoint, trainer: L.Trainer) -> dict[str, Tensor]:
    """The metrics that a checkpoint can be judged by, with `epoch` and `step`."""
    return checkpoint._monitor_candidates(trainer)


def save(checkpoint: ModelCheckpoint, trainer: L.Trainer, metrics: dict[str, Tensor]) -> None:
    """Saves `last.ckpt`, which Lightning writes only together with one of the best; and one of these if it is one."""
    if checkpoint.monitor in metrics:
        checkpoint._save_topk_checkpoint(trainer, metrics)
    checkpoint._save_last_checkpoint(trainer, metrics)


def remove_checkpoint(checkpoint: ModelCheckpoint, trainer: L.Trainer, path: str) -> None:
    """Removes a checkpoint of this run, but no other one."""
    if checkpoint._should_remove_checkpoint(trainer, path, current=""):
        checkpoint._remove_checkpoint(trainer, path)


def unasked_checkpoint(trainer: L.Trainer) -> str | None:
    """The checkpoint that Lightning goes on from in a job of SLURM that is given none: it saves one when requeued."""
    return trainer._checkpoint_connector._hpc_resume_path if SLURMEnvironment.detect() else None


def start_method(strategy: Any) -> str:
    """How a strategy starts its processes: `popen` starts the program again; empty if it starts none."""
    return str(getattr(strategy, "_start_method", ""))


def saves_in_steps(checkpoint: ModelCheckpoint) -> bool:
    """Whether it saves between updates, by their number or by time."""
    return checkpoint._every_n_train_steps > 0 or checkpoint._train_time_interval is not None


def saves_at_validation(checkpoint: ModelCheckpoint, trainer: L.Trainer) -> bool:
    """Whether it would save at the end of a validation, when the step has not ended."""
    return not checkpoint._should_save_on_train_epoch_end(trainer)


def save_after_steps(checkpoints: Sequence[ModelCheckpoint], saves: bool) -> None:
    """Lets these save at the end of the step, or else at that of its validation."""
    for checkpoint in checkpoints:
        checkpoint._save_on_train_epoch_end = saves


def averages(trainer: Any) -> dict[WeightAveraging, AveragedModel | None]:
    """The average of each callback that averages the weights. Lightning has no way to ask whether one has begun."""
    return {
        callback: callback._average_model for callback in trainer.callbacks if isinstance(callback, WeightAveraging)
    }
