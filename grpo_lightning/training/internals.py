"""Every private part of Lightning, torch, tqdm and the standard library that training and the command line rely on.

One function per trick, with the reason for it. All were checked on Lightning 2.6, torch 2.13, transformers 5.17 and
tqdm 4.67. tests/training/test_internals.py tries each of them, and finds any that is used elsewhere.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from tqdm import tqdm
from transformers import PreTrainedModel

OVERRIDDEN: Mapping[type, tuple[str, ...]] = {
    # Lightning looks for `last.ckpt` before `setup`, when the callback does not know its folder yet.
    ModelCheckpoint: ("_find_last_checkpoints",),
    # Lightning reads the whole checkpoint to look for options; and ends an interrupted program with exit code 1.
    LightningCLI: ("_parse_ckpt_path", "_run_subcommand"),
    # The writer of a file that Lightning would delete.
    CSVLogger: ("_experiment",),
    # FSDP over all devices; Lightning's "auto" shards over nodes alone.
    ModelParallelStrategy: ("_data_parallel_size",),
}
"""Private methods and attributes that classes of this package replace."""


BEFORE_TRAINING = -1
"""x of a validation that comes before the first step."""


def log_at_step(trainer: L.Trainer) -> None:
    """Lets all that is logged stand at the running step; Lightning and its monitors count updates, made or not."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.current_epoch


@contextmanager
def standing(trainer: L.Trainer, step: int | None) -> Iterator[None]:
    """Lets `validate` and `test` log at `step`, by default at the last step that this trainer has done.

    Lightning would log at the next one, or at 0: it restores the loops of a checkpoint for `fit` alone.
    """
    updates, progress = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    before = updates._batches_that_stepped, progress.completed
    updates._batches_that_stepped = progress.completed = before[1] - 1 if step is None else step
    try:
        yield
    finally:
        updates._batches_that_stepped, progress.completed = before


def summary_writer(logger: TensorBoardLogger) -> Any:
    """TensorBoard's file writer: the public `add_hparams` would write into a folder of its own."""
    return logger.experiment._get_file_writer()


def event_file(logger: TensorBoardLogger) -> Path:
    """The file that TensorBoard's writer writes to."""
    return Path(summary_writer(logger).event_writer._file_name)


def without_callback(cli: LightningCLI, key: str) -> None:
    """Takes a callback that the command line always adds out of the one run that is about to be made."""
    cli._parser(cli.subcommand).callback_keys.remove(key)


def arguments_of(cli: LightningCLI, subcommand: str) -> dict[str, Any]:
    """The arguments that the command line would call the trainer's method `subcommand` with."""
    return cli._prepare_subcommand_kwargs(subcommand)


def monitored(checkpoint: ModelCheckpoint, trainer: L.Trainer) -> dict[str, Tensor]:
    """The metrics that a checkpoint can be judged by, with `epoch` and `step`."""
    return checkpoint._monitor_candidates(trainer)


def save_best(checkpoint: ModelCheckpoint, trainer: L.Trainer, metrics: dict[str, Tensor]) -> None:
    """Saves if these metrics are among the best; the public hooks save at moments that do not resume exactly."""
    checkpoint._save_topk_checkpoint(trainer, metrics)


def save_last(checkpoint: ModelCheckpoint, trainer: L.Trainer, metrics: dict[str, Tensor]) -> None:
    """Saves `last.ckpt`."""
    checkpoint._save_last_checkpoint(trainer, metrics)


def remove_checkpoint(checkpoint: ModelCheckpoint, trainer: L.Trainer, path: str) -> None:
    """Removes a checkpoint of this run, but no other one."""
    if checkpoint._should_remove_checkpoint(trainer, path, current=""):
        checkpoint._remove_checkpoint(trainer, path)


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


def bars_of(callback: TQDMProgressBar) -> list[Any]:
    """The bars that a progress bar has made so far; the public properties raise for the others."""
    names = ("_train_progress_bar", "_val_progress_bar", "_test_progress_bar", "_predict_progress_bar")
    return [bar for name in names if (bar := getattr(callback, name)) is not None]


def bars_on_screen() -> list[Any]:
    """All bars of this process that are drawn, whoever made them."""
    return [bar for bar in list(getattr(tqdm, "_instances", [])) if not getattr(bar, "disable", True)]


def adopt_ranks() -> list[Popen[Any]]:
    """Takes the ranks that Lightning has started from its own observer, which ends this process by SIGKILL."""
    adopted: list[Popen[Any]] = []
    for thread in threading.enumerate():
        if thread.name == "child-process-observer" and getattr(thread, "_child_processes", None):
            adopted += thread._child_processes  # type: ignore[attr-defined]
            thread._child_processes = []  # type: ignore[attr-defined]
    return adopted


def attention_of(model: PreTrainedModel) -> str:
    """The attention that a model uses now; the public name is that of what it was loaded with."""
    return str(model.config._attn_implementation)
