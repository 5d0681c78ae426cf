"""Checkpoint files: written whole or not at all, read with one message for any defect, and fitted to other options."""

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
    """Writes a checkpoint to a file beside it and then renames that, so that a killed run never leaves half a file.

    Lightning itself writes to the temporary folder and moves the file, which copies it between file systems.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes the file, and waits until it is on the disk."""
        with beside(Path(path)) as partial, partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The content of the file; see `read_checkpoint`."""
        if "://" in str(path):
            return super().load_checkpoint(path, *args, **kwargs)
        return read_checkpoint(path, weights_only=kwargs.get("weights_only"))


def read_checkpoint(path: str | Path, mmap: bool = False, weights_only: bool | None = None) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU; a file that is missing, damaged or of another program is refused."""
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only)
    except Exception as error:
        others = [str(other) for other in sorted(Path(path).parent.glob("*.ckpt")) if other != Path(path)]
        instead = f"Continue with {' or '.join(others)}" if others else "There is no other checkpoint beside it"
        reason = f"the file is damaged, or no checkpoint. {instead}"
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
        elif isinstance(error, OSError) and error.errno != errno.EINVAL:  # of mmap, where a file ends too early
            reason = f"cannot be read: {error.strerror or error}"
        raise UsageError(f"ckpt_path={path}: {reason}") from error
    weights = checkpoint.get("state_dict", {}) if isinstance(checkpoint, dict) and "loops" in checkpoint else ()
    if not any(str(name).startswith("policy.") for name in weights):
        raise UsageError(
            f"ckpt_path={path}: not a checkpoint of `grpo fit`. The weights of a model are given as model.policy.path"
        )
    return checkpoint


def check_whole_step(checkpoint: Mapping[str, Any], path: Any) -> None:
    """Raises UsageError for a checkpoint that was saved in the middle of a step, whose completions are gone."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    if progress["started"] != progress["processed"]:
        raise UsageError(
            f"ckpt_path={path}: it was saved in the middle of step {progress['started']}, from where no run can go on. "
            "Continue from a checkpoint of the end of a step, such as last.ckpt; `grpo validate` and `grpo export` "
            "read this one too"
        )


def check_same_model(checkpoint: Mapping[str, Any], own: Mapping[str, Any], base: str, where: Any, path: str) -> None:
    """Raises UsageError for a checkpoint of another model, or of an adapter that was trained on other weights.

    `own` are the weights of the module by name, and `base` is the fingerprint of those beneath its adapter, if any.
    """
    here, there = (
        {name: list(value.shape) for name, value in state.items() if name.startswith("policy.")}
        for state in (own, checkpoint["state_dict"])
    )
    names = here | there
    differ = [name for name in names if here.get(name) != there.get(name)]
    trains, trained = ("an adapter" if any(".lora_" in name for name in by) else "all weights" for by in (here, there))
    if differ and trains != trained:
        raise UsageError(
            f"ckpt_path={where}: it is of a run that trained {trained}, and this one trains {trains}. "
            "Give model.policy.adapter as that run had it; to train further in another way, make a folder of it "
            "with `grpo export` and give that as model.policy.path"
        )
    if differ:
        name = differ[0]
        raise UsageError(
            f"ckpt_path={where}: it is of another model than policy.path={path}: "
            f"{name.removeprefix('policy.model.')} is {there.get(name, 'missing')} in the checkpoint and "
            f"{here.get(name, 'missing')} in the model ({len(differ)} of {len(names)} weights differ)"
        )
    if base and checkpoint.get("base") not in (None, base):
        raise UsageError(
            f"ckpt_path={where}: its adapter was trained on other weights than those of policy.path={path}. Give the "
            "model that the run was started with"
        )


def fit_snapshots(saved: dict[str, Any], snapshots: Mapping[str, PolicySnapshot | None]) -> None:
    """Makes the snapshots in a checkpoint those of now: new ones start as its policy, `reference` as `policy.path`."""
    for part, snapshot in snapshots.items():
        own = {} if snapshot is None else snapshot.state_dict(prefix=f"{part}.")
        for name in [name for name in saved if name.startswith(f"{part}.") and name not in own]:
            del saved[name]
        for name in own.keys() - saved.keys():
            of_policy = saved.get(name.removeprefix(f"{part}."))
            saved[name] = own[name] if part == "reference" or of_policy is None else of_policy
