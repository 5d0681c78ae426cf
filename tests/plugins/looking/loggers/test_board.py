"""The loggers of a run: their folder, and what they show of a run that goes on from an earlier checkpoint."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import Grpo
from helpers.fast import fit
from helpers.fitting import events_of
from lightning.pytorch.loggers import Logger

from grpo_lightning import Board, SampledCompletions, StepCheckpoint
from grpo_lightning.plugins.looking.report import report_command
from grpo_lightning.plugins.looking.run_files.run_scalars import read_scalars
from grpo_lightning.training.board import RunCSVLogger


@pytest.mark.whole
@pytest.mark.parametrize("logger", [Board, RunCSVLogger])
def test_a_run_that_goes_back_shows_no_repeated_step_twice(logger: Any, tmp_path: Path) -> None:
    def go(steps: int, rate: float, resume: str | None = None) -> None:
        fit(
            tmp_path,
            [StepCheckpoint(keep=-1), SampledCompletions(every_n_steps=1)],
            trainer={
                "max_epochs": steps,
                "enable_checkpointing": True,
                "limit_val_batches": 1.0,
                "logger": logger(str(tmp_path)),
            },
            ckpt_path=resume,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        )

    go(3, 0.5)
    whole = read_scalars(tmp_path)
    assert [step for step, _ in whole["val/reward"]] == [-1, 0, 1, 2]
    go(2, 0.25, str(tmp_path / "checkpoints" / "step-1.ckpt"))
    found = read_scalars(tmp_path)
    assert found["optim/lr"] == [(0, 0.5), (1, 0.25)]
    assert found["val/reward"][:2] == whole["val/reward"][:2] and len(found["val/reward"]) == 3
    if logger is Board:
        # TensorBoard itself, which reads all files of the folder as one.
        events = events_of(tmp_path)
        assert [event.step for event in events.Scalars("optim/lr")] == [0, 1]
        assert {event.step for event in events.Tensors("completions/text_summary")} == {0, 1}


class Elsewhere(Logger):
    """Keeps its curves in no file."""

    name = version = "elsewhere"
    made: Path

    def __init__(self, save_dir: str = ".") -> None:
        super().__init__()
        type(self).made = Path(save_dir)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "shown"),
    [("TensorBoardLogger", "tensorboard --logdir run"), ("test_board.Elsewhere", "Elsewhere; run/metrics.csv")],
)
def test_a_logger_is_one_word_and_its_run_is_reported(
    name: str, shown: str, grpo: Grpo, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for options in (["--trainer.max_epochs=1"], ["--trainer.max_epochs=2", "--ckpt_path=last"]):
        grpo.ok("fit", f"--trainer.logger={name}", *options)
    curves = [text for text in caplog.text.splitlines() if text.startswith("curves")]
    assert curves[-1].split(maxsplit=1)[1] == shown
    assert name != "test_board.Elsewhere" or Elsewhere.made == Path("run")
    assert Path("run/metrics.csv").exists() == (name != "TensorBoardLogger")
    assert not Path("run/lightning_logs").exists()
    assert [step for step, _ in read_scalars("run")["reward/mean"]] == [0, 1]
    assert report_command.main(["run"]) == 0 and "1 run" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_logger_that_is_not_installed_is_one_line(grpo: Grpo, package: str) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    assert package in grpo.mistake("fit", f"--trainer.logger={package.title()}Logger")


def test_the_last_row_of_a_table_may_be_half_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("a,b,step\n0.5,,0\n,1e-3,1\n0.25,1e-")
    assert read_scalars(tmp_path) == {"a": [(0, 0.5)], "b": [(1, 0.001)]}
