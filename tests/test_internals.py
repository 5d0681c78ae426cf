"""Private parts of libraries: each trick works on the installed versions, and none is used outside of its file."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from helpers.fast import fit
from helpers.fitting import scalars
from helpers.paths import ROOT
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.distributed import distributed_c10d
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

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


OF_TORCH_AND_TRANSFORMERS = {
    "engines/plain.py": "_is_stateful",
    "engines/trial.py": "_attn_implementation",
    "plugins/compute/fast/fast_compute.py": "_attn_implementation",
    "plugins/compute/fast/products.py": "_linear_pointwise _forward_hooks _forward_pre_hooks _backward_hooks "
    "_backward_pre_hooks",
    "plugins/compute/planning/memory.py": "_attn_implementation _pytree _python_dispatch _subclasses",
    "plugins/engines/native/linear_copies.py": "_is_mkldnn_bf16_supported _linear_pointwise _reorder_linear_weight",
    "plugins/engines/native/native.py": "_attn_implementation",
    "plugins/engines/native/shared_prompts.py": "_scaled_dot_product_flash_attention_for_cpu",
    "plugins/engines/vllm/guest.py": "_update_default_pg",
    "plugins/methods/distillation/states.py": "_parameters",
    "policy/compute.py": "_attn_implementation",
    "policy/pretrained.py": "_model_mapping",
    "policy/sharding.py": "_forward_hooks _forward_pre_hooks",
}
"""The private names that are used where models are, by file."""


def test_no_private_part_of_a_library_is_used_elsewhere() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    outside = {path: tree for path, tree in trees.items() if not path.name.endswith("internals.py")}
    defined = {name for tree in outside.values() for name in defined_names(tree)}
    overridden = {name for names in OVERRIDDEN.values() for name in names}
    # Public but for their names: os._exit, and what every named tuple has.
    public = {"_exit", "_asdict", "_field_defaults", "_fields", "_make", "_replace"}
    private = {
        path.relative_to(PACKAGE).as_posix(): private_names(tree) - defined - overridden - public
        for path, tree in outside.items()
    }
    assert {path: names for path, names in private.items() if names} == {
        path: {*names.split()} for path, names in OF_TORCH_AND_TRANSFORMERS.items()
    }


def test_the_private_names_of_torch_and_transformers_are_there() -> None:
    places: list[Any] = [
        PreTrainedModel,
        AutoModelForImageTextToText,
        PretrainedConfig(),
        torch.nn.Linear(1, 1),
        torch.ops.mkldnn,
        torch.ops.aten,
        torch.utils,
        torch,
        distributed_c10d,
    ]
    names = {name for names in OF_TORCH_AND_TRANSFORMERS.values() for name in names.split()}
    assert {name for name in names if not any(hasattr(place, name) for place in places)} == set()


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
