"""A run that is killed and resumed is the run that was never killed, bit for bit."""

import shutil
from pathlib import Path

import pytest
from helpers.fitting import events_of, fit
from helpers.killing import check_alike, die_and_go_on, prepare
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning import StepCheckpoint, UsageError
from grpo_lightning.training.board import rewind


def test_sigkills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    prepare(tmp_path)
    die_and_go_on(tmp_path, 3)
    check_alike(tmp_path)


def test_another_runs_checkpoint_does_not_write_over_the_run_that_is_here(tmp_path: Path) -> None:
    def go(folder: Path, steps: int, path: Path | None = None) -> None:
        trainer = {"max_epochs": steps, "enable_checkpointing": True}
        fit(folder, [StepCheckpoint(keep=2)], trainer=trainer, ckpt_path=path)

    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir()}

    go(tmp_path / "here", 2)
    go(tmp_path / "other", 1)
    before = files(tmp_path / "here"), files(tmp_path / "other")
    with pytest.raises(UsageError, match="already holds a run"):
        go(tmp_path / "here", 3, tmp_path / "other" / "checkpoints" / "last.ckpt")
    # An empty folder takes it up, and leaves the other run alone.
    go(tmp_path / "new", 2, tmp_path / "other" / "checkpoints" / "last.ckpt")
    assert (files(tmp_path / "here"), files(tmp_path / "other")) == before


def test_a_start_that_was_killed_while_curves_went_back_stops_no_later_one(tmp_path: Path) -> None:
    first, second = (TensorBoardLogger(tmp_path, name="", version="") for _ in range(2))
    for step in range(4):
        first.log_metrics({"x": float(step)}, step)
    first.finalize("success")
    (file,) = tmp_path.glob("events*")
    shutil.copy(file, f"{file}.partial")
    second.log_metrics({"x": 9.0}, 9)
    rewind(second, steps=2)
    assert not [*tmp_path.glob("*.partial")]
    assert [event.step for event in events_of(file).Scalars("x")] == [0, 1]
