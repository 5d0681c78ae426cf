"""Private parts of libraries: each trick works on the installed versions, and none is used outside of its file."""

import ast
import inspect
import re
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.command import OPTIONS, Grpo
from helpers.fitting import fit, scalars
from helpers.paths import ROOT
from helpers.tiny import model_of
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.cli import GRPOCLI
from grpo_lightning.command import internals as command_internals
from grpo_lightning.training import internals
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint

PACKAGE = ROOT / "grpo_lightning"
OVERRIDDEN = {**internals.OVERRIDDEN, **command_internals.OVERRIDDEN}


def private_names(tree: ast.AST) -> set[str]:
    """Names that begin with one underscore: attributes that are read, and parts of imported modules."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("grpo_lightning"):
            found |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def defined_names(tree: ast.AST) -> set[str]:
    """What a file defines: functions, classes, variables and attributes that are assigned."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_no_private_part_of_a_library_is_used_elsewhere() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    own = {name for path, tree in trees.items() if path.name != "internals.py" for name in defined_names(tree)}
    overridden = {name for names in OVERRIDDEN.values() for name in names}
    process = {"_exit"}  # os._exit is public but for its name
    folders = {"training", "callbacks", "command"}
    for path, tree in trees.items():
        if path.name != "internals.py" and (path.parent.name in folders or path.name == "cli.py"):
            assert private_names(tree) - own - overridden - process == set(), path


def test_what_is_overridden_is_there() -> None:
    for base, names in OVERRIDDEN.items():
        assert all(re.search(rf"(def |self\.){name}\b", inspect.getsource(base)) for name in names), base


def test_everything_stands_at_its_exploration_step(tmp_path: Path) -> None:
    """Whatever the number of updates, what Lightning's own callbacks log too; one point of each metric per step."""
    monitor, checkpoint = LearningRateMonitor(), StepCheckpoint()
    run: dict[str, Any] = {"loop": {"mu": 2, "num_minibatches": 2}, "callbacks": [monitor, checkpoint]}
    trainer: dict[str, Any] = {"limit_val_batches": 1, "enable_checkpointing": True}
    fit(tmp_path, **run, trainer=trainer | {"max_epochs": 2})
    fit(tmp_path, **run, trainer=trainer, ckpt_path="last")
    found = scalars(tmp_path)
    elsewhere = {name for name, points in found.items() if [*points] != [0, 1, 2]}
    assert all(name.startswith("val/") or name in ("epoch", "rollout/length_right") for name in elsewhere)
    assert [*found["val/reward"]] == [*found["epoch"]] == [-1, 0, 1, 2]
    assert [*found["optim/updates"].values()] == [4, 4, 4] and "lr-SGD" in found


def test_validation_stands_at_the_step_that_is_given(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    for given, at in ((3, 3), (None, -1)):
        with internals.standing(trainer, given):
            assert (trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.current_epoch) == (at, at)
        assert (trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.current_epoch) == (0, 0)


def test_the_file_writer_takes_summaries(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    assert callable(internals.summary_writer(logger).add_summary)
    assert [internals.event_file(logger)] == [*tmp_path.glob("events.out.tfevents.*")]


def test_the_arguments_of_a_subcommand(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []

    def look(cli: GRPOCLI, subcommand: str) -> None:
        found.append(internals.arguments_of(cli, subcommand))

    monkeypatch.setattr(GRPOCLI, "_run_subcommand", look)
    assert grpo("fit", "--ckpt_path=last")[0] == 0
    assert {"model", "datamodule", "ckpt_path"} <= found[0].keys()
    assert OPTIONS["model.policy.path"] == found[0]["model"].policy.path


class Saves(L.Callback):
    """Saves with the tricks, at the end of the first step."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        self.checkpoint = checkpoint

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        checkpoint = self.checkpoint
        metrics = internals.monitored(checkpoint, trainer)
        assert {"epoch", "step"} <= metrics.keys()
        internals.save_best(checkpoint, trainer, metrics)
        assert [path.name for path in Path(checkpoint.dirpath or "").iterdir()] == ["best.ckpt"]
        internals.save_last(checkpoint, trainer, metrics)
        assert {path.name for path in Path(checkpoint.dirpath or "").iterdir()} == {"best.ckpt", "last.ckpt"}
        internals.remove_checkpoint(checkpoint, trainer, checkpoint.best_model_path)
        assert [path.name for path in Path(checkpoint.dirpath or "").iterdir()] == ["last.ckpt"]


def test_when_a_checkpoint_callback_saves() -> None:
    checkpoint, trainer = ModelCheckpoint(), L.Trainer(check_val_every_n_epoch=2, logger=False)
    assert internals.saves_at_validation(checkpoint, trainer) and not internals.saves_in_steps(checkpoint)
    internals.save_after_steps([checkpoint], True)
    assert not internals.saves_at_validation(checkpoint, trainer)
    assert internals.saves_in_steps(ModelCheckpoint(every_n_train_steps=1))
    assert internals.saves_in_steps(ModelCheckpoint(train_time_interval=timedelta(1)))


def test_a_checkpoint_is_saved_and_removed_at_a_moment_of_choice(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "saved",
        filename="best",
        monitor="epoch",
        save_last=True,
        save_on_train_epoch_end=False,
        every_n_epochs=9,
    )
    trainer = {"max_epochs": 1, "enable_checkpointing": True}
    fit(tmp_path, [Saves(checkpoint), checkpoint], trainer=trainer)


def test_the_bars_that_there_are() -> None:
    bar = TQDMProgressBar()
    assert internals.bars_of(bar) == []
    bar.train_progress_bar = bar.init_train_tqdm()
    try:
        assert internals.bars_of(bar) == [bar.train_progress_bar]
        assert bar.train_progress_bar in internals.bars_on_screen()
    finally:
        bar.train_progress_bar.close()
    assert bar.train_progress_bar not in internals.bars_on_screen()


def test_lightnings_observer_hands_its_processes_over() -> None:
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        observer = _ChildProcessObserver(main_pid=0, child_processes=[child])
        # Started without its own `run`, which would look after the processes.
        looking = threading.Event()
        observer.run = looking.wait  # type: ignore[method-assign, assignment]
        observer.start()
        assert internals.adopt_ranks() == [child]
        assert internals.adopt_ranks() == []
        looking.set()
        observer.join()
    finally:
        child.kill()
        child.wait()


def test_the_attention_that_is_used_now() -> None:
    model = model_of("llama")
    assert internals.attention_of(model) == "sdpa"
    model.set_attn_implementation("eager")
    assert internals.attention_of(model) == "eager"


def test_tensors_without_numbers_and_what_they_are_made_by() -> None:
    made: list[Any] = []

    class Notes(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            made.extend(internals.tree_leaves([result]))
            return result

    with internals.FakeTensorMode(), Notes():
        result = torch.zeros(2**40, 4) + 1  # 16 TiB
    assert result.shape == made[-1].shape == (2**40, 4)
