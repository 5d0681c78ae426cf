"""What a run prints: one line per step or a bar, and a summary at its end."""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.command import Grpo
from helpers.fitting import fit, scalars
from lightning.pytorch.callbacks import EarlyStopping

from grpo_lightning.plugins.inspect.inspector import Inspector
from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.training import pace as paces
from grpo_lightning.training.board import Board
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.training.callbacks.completions import SampledCompletions
from grpo_lightning.training.callbacks.layout import FirstLook
from grpo_lightning.training.callbacks.lines import StepLines, line
from grpo_lightning.training.callbacks.progress import StepProgressBar
from grpo_lightning.training.callbacks.summary import RunSummary
from grpo_lightning.training.loop import GRPOLoop
from grpo_lightning.training.pace import Pace, duration
from grpo_lightning.types import Sample

VALIDATES: dict[str, Any] = {"limit_val_batches": 1.0, "max_epochs": 3}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (190800, "2 d 05 h"),
    ],
)
def test_a_duration_is_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_time_left_is_that_of_the_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(paces, "perf_counter", lambda: now[0])
    pace = Pace(done=4, total=10)
    assert pace.left is None
    for now[0] in (102.0, 108.0):
        pace.step_ended()
    assert pace.left == 4 * 4
    now[0] = 111.0
    assert pace.left == 13
    assert Pace(0, -1).left is None and Pace(0, None).left is None


def test_a_line_has_what_one_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(paces, "perf_counter", lambda: now[0])
    pace = Pace(0, 60)
    now[0] = 20.0
    for _ in range(10):
        pace.step_ended()
    metrics = {"reward/mean": 0.914, "rollout/length_mean": 14.25, "time/explore": 1.24, "time/optimise": 0.61}
    scores = {"avg@8": 0.7249, "greedy": 0.98}
    assert line(10, pace, metrics | {"time/reward": 0.01}, scores) == (
        "step 10/60: reward 0.91, length 14.2; explore 1.2 s, update 0.6 s; val avg@8 0.72, greedy 0.98; "
        "1 min 40 s left"
    )


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith(("step ", "before training"))]


def test_a_run_prints_one_line_per_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, [StepLines()], trainer=VALIDATES | {"check_val_every_n_epoch": 2})
    seen, lines = scalars(tmp_path), lines_of(caplog)
    assert [text.partition(":")[0] for text in lines] == ["before training", "step 1/3", "step 2/3", "step 3/3"]
    for text, update in zip(lines[1:], (0, 1, 2), strict=True):
        assert f"reward {seen['reward/mean'][update]:.2f}, length {seen['rollout/length_mean'][update]:.1f};" in text
        assert ("val avg@2" in text) == (update > 0)  # the last step always
    assert f"val avg@2 {seen['val/avg@2'][-1]:.2f}, greedy {seen['val/greedy'][-1]:.2f}" in lines[0]
    assert "left" in lines[2] and "left" not in lines[3]


def summary_of(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    (text,) = [text for text in caplog.messages if text.startswith("done")]
    return dict(re.split(r"  +", row, maxsplit=1) for row in text.splitlines())  # type: ignore[misc]


def test_the_summary_tells_what_changed_and_where_to_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = [StepCheckpoint(keep=1, monitor="val/reward"), RunSummary()]
    fit(tmp_path, saving, trainer=VALIDATES | {"enable_checkpointing": True})
    seen, rows = scalars(tmp_path), summary_of(caplog)
    average, greedy = seen["val/avg@2"], seen["val/greedy"]
    assert rows["validation"] == (
        f"avg@2 {average[-1]:.2f} -> {average[2]:.2f}, greedy {greedy[-1]:.2f} -> {greedy[2]:.2f} "
        "(before training -> after step 3): mean of Digits"
    )
    best = max(range(3), key=lambda update: seen["val/reward"][update])
    assert rows["best"].startswith(f"{tmp_path}/checkpoints/step-{best + 1}.ckpt (val/reward ")
    assert rows["done"].startswith("3 of 3 steps in ") and rows["saved"] == f"{tmp_path}/checkpoints/last.ckpt"
    assert rows["curves"] == f"tensorboard --logdir {tmp_path}"
    assert "tokens" not in rows and "go on" not in rows  # no records, no config.yaml


def test_the_summary_of_a_resumed_run_knows_the_first_validation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps, path in ((1, None), (3, "last")):
        caplog.clear()
        callbacks = [StepCheckpoint(), RunSummary()]
        trainer = VALIDATES | {"enable_checkpointing": True, "max_epochs": steps}
        fit(tmp_path, callbacks, trainer=trainer, ckpt_path=path)
    rows = summary_of(caplog)
    assert rows["validation"].endswith("(before training -> after step 3): mean of Digits")
    assert rows["done"].startswith("3 of 3 steps, from step 2 in ")
    assert f"avg@2 {scalars(tmp_path)['val/avg@2'][-1]:.2f} -> " in rows["validation"]


def test_the_command_line_prints_lines_unless_it_has_a_terminal(
    grpo: Grpo, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, errors = grpo("fit", "--trainer.enable_progress_bar!")
    assert code == 0, errors
    assert [text.partition(":")[0] for text in lines_of(caplog)] == ["before training", "step 1/1"]
    assert "update:" not in out + errors and "stopped: `max_epochs" not in out + errors  # of a bar, of Lightning
    assert summary_of(caplog)["go on"] == "grpo fit --config run/config.yaml --ckpt_path last --trainer.max_epochs 2"
    caplog.clear()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    code, out, errors = grpo("fit", "--trainer.enable_progress_bar!", "--trainer.default_root_dir=other")
    assert code == 0, errors
    assert lines_of(caplog) == []


class Look(L.Callback):
    """What stands before and behind the bar in each phase."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def look(self, trainer: L.Trainer) -> None:
        bar = trainer.progress_bar_callback
        assert isinstance(bar, StepProgressBar)
        self.seen.append((bar.train_progress_bar.desc, bar.train_progress_bar.postfix or ""))

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.look(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.look(trainer)


def test_the_bar_has_step_phase_reward_validation_and_the_time_left(tmp_path: Path) -> None:
    look = Look()
    trainer = VALIDATES | {"enable_progress_bar": True, "max_epochs": 2, "limit_val_batches": 1}
    fit(tmp_path, [StepProgressBar(), look], trainer=trainer)
    seen = scalars(tmp_path)
    phases = [before for before, _ in look.seen]
    assert phases == [
        "before training validate: ",
        "step 1/2 update: ",
        "step 1/2 validate: ",
        "step 2/2 update: ",
        "step 2/2 validate: ",
    ]
    _, first, _, second, _ = (dict(part.split("=") for part in after.split(", ") if part) for _, after in look.seen)
    assert {*first} == {"reward/mean", "val/avg@2", "val/greedy"}
    for shown, update in ((first, 0), (second, 1)):
        assert float(shown["reward/mean"]) == pytest.approx(seen["reward/mean"][update], abs=5e-3)
        assert float(shown["val/avg@2"]) == pytest.approx(seen["val/avg@2"][update - 1], abs=5e-3)
    assert "left" in second


class NoDigits(Reward):
    """Fails on every sample, or works."""

    def __init__(self, fails: bool = True) -> None:
        super().__init__()
        self.fails = fails

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        if self.fails:
            raise RuntimeError("no service")
        return RewardResult([0.0] * len(samples))


@pytest.mark.parametrize("bar", [False, True])
def test_a_step_whose_rewards_all_fail_is_shown(bar: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown = StepProgressBar() if bar else StepLines()
    callbacks = [shown, FirstLook(), RunSummary(), SampledCompletions(every_n_steps=1), Inspector(every_n_steps=1)]
    saving = StepCheckpoint(keep=1, monitor="reward/mean")
    trainer = VALIDATES | {"enable_progress_bar": bar, "max_epochs": 2, "enable_checkpointing": True}
    stopping = EarlyStopping("reward/mean", mode="max", patience=9, check_finite=False)
    board = Board(tmp_path, name="", version="")
    fit(
        tmp_path,
        [*callbacks, saving, stopping],
        trainer=trainer | {"logger": board},
        rewards=[NoDigits()],
        max_failed_rewards=1.0,
    )
    lines = [text for text in lines_of(caplog) if text.startswith("step")]
    assert all("no reward, length " in text for text in lines) and len(lines) == (0 if bar else 2)
    assert all(math.isnan(value) for value in scalars(tmp_path)["reward/mean"].values())
    assert summary_of(caplog)["done"].startswith("2 of 2 steps")


@pytest.mark.parametrize("bar", [False, True])
def test_a_loop_that_is_used_again_has_no_observer_of_the_run_before(bar: bool, tmp_path: Path) -> None:
    class Stops(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            raise RuntimeError("stop")

    loop, shown = GRPOLoop(group_size=4, prompts_per_step=4), StepProgressBar() if bar else StepLines()
    options = {"callbacks": [shown, Stops(), loop], "max_epochs": 1, "enable_progress_bar": bar}
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path, trainer=options)
    assert loop.observers == []


class Ends(L.Callback):
    """Ends the run after its first step."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = True


def test_a_run_without_an_end_counts_its_steps_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = {"max_epochs": -1, "max_time": {"days": 9}}
    fit(tmp_path / "lines", [StepLines(), RunSummary(), Ends()], trainer=VALIDATES | limit)
    assert [text.partition(":")[0] for text in lines_of(caplog)] == ["before training", "step 1"]
    assert summary_of(caplog)["done"].startswith("1 steps in ")
    (sizes,) = [text for text in caplog.messages if " prompts x " in text]
    assert sizes.startswith("any number of steps of 4 prompts x 4 completions")
    look = Look()
    fit(tmp_path / "bar", [StepProgressBar(), look, Ends()], trainer=limit | {"enable_progress_bar": True})
    assert [before for before, _ in look.seen] == ["step 1 update: "]
