"""Every private part of Lightning, torch, tqdm and the standard library that training and the command line rely on.

One function per trick, with the reason for it. All were checked on Lightning 2.6, torch 2.13, transformers 5.17 and
tqdm 4.67. tests/training/test_internals.py tries each of them, and finds any that is used elsewhere.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from tqdm import tqdm
from transformers import PreTrainedModel

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""Its warnings are about tensors without numbers, which a plan makes on purpose."""

OVERRIDDEN: Mapping[type, tuple[str, ...]] = {
    # Lightning looks for `last.ckpt` before `setup`, when the callback does not know its folder yet.
    ModelCheckpoint: ("_find_last_checkpoints",),
    # Lightning reads the whole checkpoint to look for options; and ends an interrupted program with exit code 1.
    LightningCLI: ("_parse_ckpt_path", "_run_subcommand"),
    # FSDP over all devices; Lightning's "auto" shards over nodes alone.
    ModelParallelStrategy: ("_data_parallel_size",),
}
"""Private methods and attributes that classes of this package replace."""


def num_logged_updates(trainer: L.Trainer) -> int:
    """The number of updates by which Lightning's loggers count: what is logged now goes to this number minus 1.

    `trainer.global_step` counts only the updates that an optimizer made.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


@dataclass(frozen=True)
class Standing:
    """Where loggers put what is logged now."""

    update: int
    """x: the last update that has been made, counted from 0; -1 if there is none."""
    step: int
    """The exploration step of that update, which is logged as `epoch`."""


BEFORE_TRAINING = Standing(update=-1, step=-1)
"""Where a validation stands that comes before the first update."""


def standing_of(checkpoint: Mapping[str, Any]) -> Standing:
    """Where the run's own validation of a checkpoint's weights stands."""
    done = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
    return Standing(done - 1, checkpoint["epoch"])


@contextmanager
def standing(trainer: L.Trainer, where: Standing | None) -> Iterator[None]:
    """Lets `validate` and `test` log at `where`, by default at the last update that this trainer has made.

    Lightning would log at the next update, or at 0: it restores the loops of a checkpoint for `fit` alone.
    """
    updates, progress = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    before = updates._batches_that_stepped, progress.completed
    where = where or Standing(before[0] - 1, before[1] - 1)
    updates._batches_that_stepped, progress.completed = where.update, where.step
    try:
        yield
    finally:
        updates._batches_that_stepped, progress.completed = before


def log_nothing(trainer: L.Trainer) -> None:
    """Keeps Lightning from logging the last update's numbers again for an update that is not made."""
    for metric in (trainer._results or {}).values():
        metric.has_reset |= metric.meta.on_step and not metric.meta.on_epoch


def summary_writer(logger: TensorBoardLogger) -> Any:
    """TensorBoard's file writer: the public `add_hparams` would write into a folder of its own."""
    return logger.experiment._get_file_writer()


def without_callback(cli: LightningCLI, key: str) -> None:
    """Takes a callback that the command line always adds out of the one run that is about to be made."""
    cli._parser(cli.subcommand).callback_keys.remove(key)


def arguments_of(cli: LightningCLI, subcommand: str) -> dict[str, Any]:
    """The arguments that the command line would call the trainer's method `subcommand` with."""
    return cli._prepare_subcommand_kwargs(subcommand)


def skips_saving(checkpoint: ModelCheckpoint, trainer: L.Trainer) -> bool:
    """Whether Lightning would not save now: in a trial, while it validates first, or where it has just saved."""
    return checkpoint._should_skip_saving_checkpoint(trainer)


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
