"""Ctrl-C, SIGTERM and what else ends a run early: the step is done and saved, and a line says how to go on."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.command import Grpo, arguments
from helpers.fitting import fit, scalars
from helpers.programs import programs

from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A shell that starts the tests in the background makes them deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Press(L.Callback):
    """Ctrl-C, or another signal, to this very process before given updates, counted over the run."""

    def __init__(self, *updates: int, number: int = signal.SIGINT) -> None:
        self.updates = updates
        self.number = number

    def on_train_batch_start(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx in self.updates:
            os.kill(os.getpid(), self.number)


class PressInValidation(L.Callback):
    """Ctrl-C where no step runs."""

    def on_validation_batch_start(self, *args: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)


SECOND = [
    "--trainer.callbacks+=helpers.failing.Signals",
    "--trainer.callbacks.name=SIGINT",
    "--trainer.callbacks.step=2",
]
"""Ctrl-C in the second step on rank 0 alone, as `kill -INT` sends it."""
OPTIONS: dict[str, Any] = {"loop": {"num_minibatches": 2}, "trainer": {"max_epochs": 4, "enable_checkpointing": True}}


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_the_step_saves_and_resumes_exactly(
    number: int, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(number)
    fit(tmp_path / "whole", [StepCheckpoint(every_n_steps=3)], **OPTIONS)
    caplog.clear()
    checkpoint = StepCheckpoint(every_n_steps=3)
    fit(tmp_path / "cut", [checkpoint, Press(2, number=number)], **OPTIONS)
    assert checkpoint.stopped_by == name
    assert signal.getsignal(number) == handler
    # Both updates of the second step, though it came before the first.
    assert scalars(tmp_path / "cut")["optim/updates"] == {0: 2, 1: 2}
    said = "this step will be finished and saved; press it again to stop at once\n" in capfd.readouterr().err
    assert said == (name == "Ctrl-C")
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    assert f"{name}: {last} holds the run up to step 2; continue with --ckpt_path last" in caplog.messages
    fit(tmp_path / "cut", [StepCheckpoint(every_n_steps=3)], ckpt_path="last", **OPTIONS)
    assert scalars(tmp_path / "cut") == scalars(tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once_and_says_what_is_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path, [StepCheckpoint(), Press(2, 3)], **OPTIONS)
    assert stopped.value.code == 130
    assert scalars(tmp_path)["optim/updates"] == {0: 2}
    last = tmp_path / "checkpoints" / "last.ckpt"
    line = f"Ctrl-C again: stopped at once; {last} holds the run up to step 1; continue with --ckpt_path last"
    assert line in capfd.readouterr().err.splitlines()


def test_the_exit_code_is_a_shells_for_ctrl_c(grpo: Grpo, tmp_path: Path) -> None:
    steps = ["--trainer.max_epochs=3", "--loop.mu=2"]
    code, _, errors = grpo("fit", *steps, *SECOND)
    assert code == 130 and "Traceback" not in errors
    assert scalars(tmp_path / "run")["optim/updates"] == {0: 2, 1: 2}
    # Where Lightning takes it, outside of a step.
    code, _, _ = grpo("validate", "--trainer.callbacks+=test_interrupts.PressInValidation")
    assert code == 130


def test_ctrl_c_on_one_rank_ends_both(grpo: Grpo) -> None:
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.enable_progress_bar=true"]
    given = [*two, "--trainer.max_epochs=9", "--loop.mu=2", *SECOND]
    with programs({"run": arguments("fit", *given)}, Path.cwd(), together=True) as started:
        code, shown = started["run"].wait(), started["run"].errors
    assert code == 130 and "Traceback" not in shown and "Detected KeyboardInterrupt" not in shown
    # The bar is on lines of its own; a carriage return begins the line again.
    lines = [line.rpartition("\r")[2].strip() for line in shown.split("\n")]
    assert "Ctrl-C: this step will be finished and saved; press it again to stop at once" in lines
    last = Path("run", "checkpoints", "last.ckpt")
    assert lines.count(f"Ctrl-C: {last} holds the run up to step 2; continue with --ckpt_path last") == 1
