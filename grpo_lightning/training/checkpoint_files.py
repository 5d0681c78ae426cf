"""Checkpoint files: written whole or not at all, and read with one message for any defect."""

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from grpo_lightning.training.disk import beside
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
    """The content of a checkpoint, on the CPU.

    Args:
        path: The file.
        mmap: Leave tensors in the file until they are used.
        weights_only: As in `torch.load`.

    Raises:
        UsageError: The file is missing, damaged, or from another program.
    """
    refuse_folder(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only)
    except FileNotFoundError as error:
        raise UsageError(f"ckpt_path={path}: there is no such file") from error
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"ckpt_path={path}: not a checkpoint, or one that holds more than tensors and numbers. If you trust it, "
            "give --weights_only false"
        ) from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # of mmap, where the file ends before its own index says
            raise damaged(path) from error
        raise UsageError(f"ckpt_path={path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise damaged(path) from error
    if not _of_this_program(checkpoint):
        raise UsageError(
            f"ckpt_path={path}: not a checkpoint of `grpo fit`. The weights of a model are given as model.policy.path"
        )
    return checkpoint


def damaged(path: str | Path) -> UsageError:
    """The error about a file that cannot be a checkpoint; it names the others beside it."""
    others = [str(other) for other in sorted(Path(path).parent.glob("*.ckpt")) if other != Path(path)]
    instead = f"Continue with {' or '.join(others)}" if others else "There is no other checkpoint beside it"
    return UsageError(f"ckpt_path={path}: the file is damaged, or no checkpoint. {instead}")


def _of_this_program(checkpoint: Any) -> bool:
    if not isinstance(checkpoint, dict) or "loops" not in checkpoint:
        return False
    return any(str(name).startswith("policy.") for name in checkpoint.get("state_dict", {}))


def refuse_folder(checkpoint: str | Path) -> None:
    """Raises UsageError for a checkpoint of Lightning's ModelParallelStrategy, which only that can read."""
    if Path(checkpoint).is_dir():
        raise UsageError(
            f"ckpt_path={checkpoint}: a folder, with a file for each rank. Continue it with the ModelParallelStrategy "
            "that wrote it; --trainer.strategy fsdp2 writes checkpoints that every strategy reads"
        )
