"""Checkpoint files: written whole or not at all, checked when they are read, and adapted to a run's options."""

import errno
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from grpo_lightning.disk import beside
from grpo_lightning.policy.snapshots import PolicySnapshot
from grpo_lightning.types import UsageError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file beside it and renames the file, so that a killed run leaves no half file.

    Lightning itself writes to the temporary folder and moves the file, which copies it between file systems.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes the checkpoint, and waits until it is on the disk."""
        with beside(Path(path)) as partial, partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint; see `read_checkpoint`."""
        if "://" in str(path):
            return super().load_checkpoint(path, *args, **kwargs)
        return read_checkpoint(path, weights_only=kwargs.get("weights_only"))


def read_checkpoint(path: str | Path, mmap: bool = False, weights_only: bool | None = None) -> dict[str, Any]:
    """Reads a checkpoint on the CPU. Raises UsageError if the file is missing, damaged or of another program."""
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only)
    except Exception as error:
        other_paths = [str(file) for file in sorted(Path(path).parent.glob("*.ckpt")) if file != Path(path)]
        advice = (
            f"Continue with {' or '.join(other_paths)}" if other_paths else "There is no other checkpoint beside it"
        )
        reason = f"the file is damaged, or no checkpoint. {advice}"
        if isinstance(error, pickle.UnpicklingError):
            reason = (
                "not a checkpoint, or one that holds more than tensors and numbers. If you trust it, give "
                "--weights_only false"
            )
        elif isinstance(error, IsADirectoryError):
            reason = (
                "a folder, with a file for each rank. Continue it with the ModelParallelStrategy that wrote it; "
                "--trainer.strategy fsdp2 writes checkpoints that every strategy reads"
            )
        elif isinstance(error, OSError) and error.errno != errno.EINVAL:
            # EINVAL comes from mmap, for a file that ends too early.
            reason = f"cannot be read: {error.strerror or error}"
        raise UsageError(f"ckpt_path={path}: {reason}") from error
    weights = checkpoint.get("state_dict", {}) if isinstance(checkpoint, dict) and "loops" in checkpoint else ()
    if not any(str(name).startswith("policy.") for name in weights):
        raise UsageError(
            f"ckpt_path={path}: not a checkpoint of `grpo fit`. The weights of a model are given as model.policy.path"
        )
    return checkpoint


def check_whole_step(checkpoint: Mapping[str, Any], path: Any) -> None:
    """Raises UsageError for a checkpoint from the middle of a step, whose completions no file holds."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    if progress["started"] != progress["processed"]:
        raise UsageError(
            f"ckpt_path={path}: it was saved in the middle of step {progress['started']}, from where no run can go on. "
            "Continue from a checkpoint of the end of a step, such as last.ckpt; `grpo validate` and `grpo export` "
            "read this one too"
        )


def check_same_model(
    checkpoint: Mapping[str, Any], state: Mapping[str, Any], base: str, ckpt_path: Any, path: str
) -> None:
    """Raises UsageError for a checkpoint of another model, or of an adapter that was trained on other weights.

    Args:
        checkpoint: The content of the checkpoint.
        state: The weights of the module, by name.
        base: Fingerprint of the model without its adapter; empty if it has none.
        ckpt_path: The path of the checkpoint, for messages.
        path: `model.policy.path`, for messages.
    """
    shapes, saved_shapes = (
        {name: list(value.shape) for name, value in weights.items() if name.startswith("policy.")}
        for weights in (state, checkpoint["state_dict"])
    )
    names = shapes | saved_shapes
    different_names = [name for name in names if shapes.get(name) != saved_shapes.get(name)]
    trains, trained = (
        "an adapter" if any(".lora_" in name for name in weights) else "all weights"
        for weights in (shapes, saved_shapes)
    )
    if different_names and trains != trained:
        raise UsageError(
            f"ckpt_path={ckpt_path}: it is of a run that trained {trained}, and this one trains {trains}. "
            "Give model.policy.adapter as that run had it; to train further in another way, make a folder of it "
            "with `grpo export` and give that as model.policy.path"
        )
    if different_names:
        name = different_names[0]
        raise UsageError(
            f"ckpt_path={ckpt_path}: it is of another model than policy.path={path}: "
            f"{name.removeprefix('policy.model.')} is {saved_shapes.get(name, 'missing')} in the checkpoint and "
            f"{shapes.get(name, 'missing')} in the model ({len(different_names)} of {len(names)} weights differ)"
        )
    if base and checkpoint.get("base") not in (None, base):
        raise UsageError(
            f"ckpt_path={ckpt_path}: its adapter was trained on other weights than those of policy.path={path}. "
            "Give the model that the run was started with"
        )


def fit_snapshots(saved: dict[str, Any], snapshots: Mapping[str, PolicySnapshot | None]) -> None:
    """Changes the weights of a checkpoint so that they fit a run with other snapshots.

    Weights of snapshots that the run lacks are removed. A new snapshot starts as the checkpoint's policy, a new
    reference as `policy.path`.

    Args:
        saved: The weights of the checkpoint by name, which change.
        snapshots: The run's snapshots by their name in the module.
    """
    for prefix, snapshot in snapshots.items():
        state = {} if snapshot is None else snapshot.state_dict(prefix=f"{prefix}.")
        for name in [name for name in saved if name.startswith(f"{prefix}.") and name not in state]:
            del saved[name]
        for name in state.keys() - saved.keys():
            policy_weights = saved.get(name.removeprefix(f"{prefix}."))
            saved[name] = state[name] if prefix == "reference" or policy_weights is None else policy_weights
