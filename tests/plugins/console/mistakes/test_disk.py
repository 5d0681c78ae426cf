"""A full disk, or a folder that may not be written: one line says what is saved, and nothing is half-written."""

import errno
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.command import Grpo
from helpers.fitting import checkpoint_of

from grpo_lightning import disk
from grpo_lightning.plugins.console.mistakes.disk_errors import refusal
from grpo_lightning.training.checkpoint_files import AtomicCheckpointIO


def one_line(code: int, errors: str, *words: str) -> None:
    """The run ended with one message, which says all of `words`."""
    assert code == 1 and "Traceback" not in errors
    line = errors.strip().splitlines()[-1]
    assert line.startswith("grpo: error: the disk refuses to write: ")
    assert [word for word in words if word not in line] == []


LAST = "{0}/checkpoints/last.ckpt holds the run up to step 2; continue with --ckpt_path last"


def refuse(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, after: int, number: int, path: str) -> None:
    """Lets `target.name` be called `after` times, and then raise as the system does."""
    calls = 0
    original = getattr(target, name)

    def raising(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(number, os.strerror(number), path)
        return original(*args, **kwargs)

    monkeypatch.setattr(target, name, raising)


WRITES = {
    "a checkpoint, no space": (torch, "save", 2, errno.ENOSPC),
    "a checkpoint, quota": (os, "fsync", 2, errno.EDQUOT),
    "an event": (L.pytorch.loggers.TensorBoardLogger, "log_metrics", 2, errno.ENOSPC),
}


@pytest.mark.parametrize(("target", "name", "after", "number"), WRITES.values(), ids=WRITES)
def test_a_write_that_is_refused(
    target: Any, name: str, after: int, number: int, grpo: Grpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(Path("run", "checkpoints", "last.partial"))
    with monkeypatch.context() as patch:
        refuse(patch, target, name, after, number, file)
        code, _, errors = grpo("fit", "--trainer.max_epochs=4", "--trainer.limit_val_batches=0")
    one_line(code, errors, os.strerror(number), file, LAST.format("run"))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["last.ckpt"]
    assert checkpoint_of(tmp_path / "run")["epoch"] == 1


def test_a_folder_that_cannot_be_made_ends_in_a_line(grpo: Grpo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, errors = grpo("fit", "--trainer.default_root_dir=file/run")
    one_line(code, errors, "Not a directory", "no step has been saved")


def test_only_writing_counts(tmp_path: Path) -> None:
    def raised(cause: BaseException, *outer: BaseException) -> BaseException:
        """`outer` raised while `cause` was handled, each while the one before was."""
        for error in outer:
            error.__context__ = cause
            cause = error
        return cause

    full = OSError(errno.ENOSPC, "No space left on device")
    assert refusal(raised(full, RuntimeError("unexpected pos"), ValueError()), tmp_path) == full.strerror
    circle = RuntimeError()
    inside = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "run" / "config.yaml"))
    assert refusal(inside, tmp_path / "run") == f"Permission denied ({inside.filename})"
    for elsewhere in (
        PermissionError(errno.EACCES, "Permission denied", "/etc/questions.jsonl"),
        FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "run" / "x")),
        PermissionError(errno.EPERM, "Operation not permitted"),
        ValueError("no"),
        raised(circle, ValueError(), circle),
        None,
    ):
        assert refusal(elsewhere, tmp_path / "run") is None


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write_whole(tmp_path / "config.yaml", "a: 1\n")
    refuse(monkeypatch, os, "replace", 0, errno.EIO, "config.yaml")
    with pytest.raises(OSError, match=r"config\.yaml"):
        disk.write_whole(tmp_path / "config.yaml", "a: 2\n")
    refuse(monkeypatch, torch, "save", 0, errno.ENOSPC, "last.partial")
    with pytest.raises(OSError, match=r"last\.partial"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
