"""Private parts of libraries: each trick works on the installed versions, and none is used outside of its file."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import lightning as L
from helpers.fast import fit
from helpers.fitting import scalars
from helpers.paths import ROOT
from lightning.pytorch.callbacks import LearningRateMonitor

from grpo_lightning.plugins.console.cluster import launch_internals as cluster_internals
from grpo_lightning.plugins.console.display import help_internals as display_internals
from grpo_lightning.training import internals
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint

PACKAGE = ROOT / "grpo_lightning"
OVERRIDDEN = {**internals.OVERRIDDEN, **cluster_internals.OVERRIDDEN, **display_internals.OVERRIDDEN}


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
    own = {
        name for path, tree in trees.items() if not path.name.endswith("internals.py") for name in defined_names(tree)
    }
    overridden = {name for names in OVERRIDDEN.values() for name in names}
    # Public but for their names: os._exit, and what every named tuple has.
    public = {"_exit", "_asdict", "_field_defaults", "_fields", "_make", "_replace"}
    folders = {"training", "callbacks", "command", "cluster", "display", "mistakes"}
    for path, tree in trees.items():
        if not path.name.endswith("internals.py") and (path.parent.name in folders or path.name == "cli.py"):
            assert private_names(tree) - own - overridden - public == set(), path


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
    strange = {name: [*found[name]] for name in elsewhere if not re.match("val/|epoch|rollout/length_right", name)}
    assert strange == {}
    assert [*found["val/reward"]] == [*found["epoch"]] == [-1, 0, 1, 2]
    assert [*found["optim/updates"].values()] == [4, 4, 4] and "lr-SGD" in found


def test_validation_stands_at_the_step_that_is_given(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    for given, at in ((3, 3), (None, -1)):
        with internals.standing(trainer, given):
            assert (trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.current_epoch) == (at, at)
        assert (trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.current_epoch) == (0, 0)
