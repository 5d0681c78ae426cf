"""What a run prints: one line per step or a bar, and a summary at its end."""

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from helpers.command import Grpo
from helpers.fast import fit
from helpers.fitting import Echo, scalars
from lightning.pytorch.callbacks import EarlyStopping

from grpo_lightning import (
    GRPOLoop,
    Inspector,
    PromptDataModule,
    Question,
    Reward,
    RewardResult,
    RunSummary,
    Sample,
    StepCheckpoint,
    Task,
    ValidationValues,
)
from grpo_lightning.maths.metrics import clustered_half_width, with_half_width
from grpo_lightning.plugins.console.display import lines as paces
from grpo_lightning.plugins.console.display.data_line import data_line
from grpo_lightning.plugins.console.display.first_look import Board, FirstLook
from grpo_lightning.plugins.console.display.lines import Pace, StepLines, duration, line
from grpo_lightning.plugins.looking.loggers.sampled_completions import SampledCompletions
from grpo_lightning.training.evaluation import Measurement, with_questions

VALIDATES: dict[str, Any] = {"limit_val_batches": 1.0, "max_epochs": 3}


def test_a_duration_is_read_at_a_glance() -> None:
    found = [duration(seconds) for seconds in (9.94, 9.96, 59.6, 3599.6, 190800)]
    assert found == ["0:00:10", "0:00:10", "0:01:00", "1:00:00", "2 days, 5:00:00"]


def test_the_time_left_is_that_of_the_steps_left_and_ends_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(paces, "perf_counter", lambda: now[0])
    pace = Pace(num_done=4, total=10)
    assert pace.seconds_left is None
    for now[0] in (102.0, 108.0):
        pace.num_done += 1
    assert pace.seconds_left == 4 * 4
    metrics = {"reward/mean": 0.914, "rollout/length_mean": 14.25, "time/explore": 1.24, "time/optimise": 0.61}
    scores = {"avg@8": Measurement(0.7249, 0.0312, 64, ""), "greedy": Measurement(0.98, math.nan, 1, "")}
    assert line(pace, metrics | {"time/reward": 0.01}, scores) == (
        "step 6/10: reward 0.91, length 14.2; explore 1.2 s, update 0.6 s; "
        "val avg@8 0.72 ± 0.03, greedy 0.98; 0:00:16 left"
    )
    assert Pace(0, -1).seconds_left is None and Pace(0, None).seconds_left is None


class Asks(Task):
    """These questions by split; the gold answer of an empty one is missing."""

    def __init__(self, **asked: Sequence[Question]) -> None:
        self.asked = asked

    def questions(self, split: str) -> Sequence[Question]:
        return self.asked[split]


def questions(*texts: str, answer: str = "1") -> list[Question]:
    return [Question(text, answer) for text in texts]


def test_the_first_line_is_about_the_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, val = questions(*"1122334"), questions("1", "5", " 4", "5")
    trainer = VALIDATES | {"max_epochs": 1}
    fit(tmp_path, [StepLines()], trainer=trainer, data=PromptDataModule(Asks(train=train, val=val)))
    expected = "data: train 7 questions (4 distinct), val 4, 2 of them in train"
    assert next(text for text in caplog.messages if "distinct" in text or text.startswith("before")) == expected


class Endless(list[Question]):
    """As many questions as are counted, which nobody may read."""

    def __len__(self) -> int:
        return 10**12

    def __iter__(self) -> Any:
        raise AssertionError


def test_the_line_on_the_data() -> None:
    data = PromptDataModule(Asks())
    data.questions = {"train": questions("1", "2", "2"), "val": []}
    assert data_line(data) == "train 3 questions (2 distinct)"
    data.questions["val"] = [*questions("1"), *questions("2", "3", answer=" ")]
    assert data_line(data) == (
        "train 3 questions (2 distinct), val 3, 2 of them in train, 2 without a gold answer (data.task.answer)"
    )
    data.questions["val"] = [Question("1", "1", history=[{"role": "system", "content": "Add."}])]
    assert data_line(data).endswith("val 1, 0 of them in train")
    data.questions["train"] = Endless()
    assert data_line(data) == "train 1000000000000 questions, val 1"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith(("step ", "before training"))]


def intervals_of(folder: Path) -> list[dict[str, str]]:
    """The mean and its interval by metric, as text, of each validation of the run."""
    lines = [json.loads(text) for text in (folder / "validations.jsonl").read_text().splitlines()]
    return [
        {
            name: f"{sum(values) / len(values):.2f} ± {clustered_half_width(values):.2f}"
            for name, values in validation["values"].items()
        }
        for validation in lines
    ]


def summary_of(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    (text,) = [text for text in caplog.messages if text.startswith("done")]
    return dict(re.split(r"  +", row, maxsplit=1) for row in text.splitlines())  # type: ignore[misc]


def test_a_run_prints_one_line_per_step_and_what_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = [StepLines(), StepCheckpoint(keep=1, monitor="val/reward"), RunSummary(), ValidationValues()]
    fit(tmp_path, saving, trainer=VALIDATES | {"check_val_every_n_epoch": 2, "enable_checkpointing": True})
    seen, lines, rows = scalars(tmp_path), lines_of(caplog), summary_of(caplog)
    assert [text.partition(":")[0] for text in lines] == ["before training", "step 1/3", "step 2/3", "step 3/3"]
    for text, update in zip(lines[1:], (0, 1, 2), strict=True):
        assert f"reward {seen['reward/mean'][update]:.2f}, length {seen['rollout/length_mean'][update]:.1f};" in text
        assert ("val avg@2" in text) == (update > 0)  # the last step always
    before, _, after = intervals_of(tmp_path)
    assert lines[0] == (
        f"before training: val avg@2 {before['avg@2']}, greedy {before['greedy']} (24 questions): mean of Digits"
    )
    assert "left" in lines[2] and "left" not in lines[3]
    assert rows["validation"] == (
        f"avg@2 {before['avg@2']} -> {after['avg@2']}, greedy {before['greedy']} -> {after['greedy']} (24 questions), "
        "before training -> after step 3: mean of Digits"
    )
    best = max((1, 2), key=lambda update: seen["val/reward"][update])
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
    assert rows["validation"].endswith(" (24 questions), before training -> after step 3: mean of Digits")
    assert rows["done"].startswith("3 of 3 steps, from step 2 in ")
    assert re.match(rf"avg@2 {scalars(tmp_path)['val/avg@2'][-1]:.2f} ± 0\.\d\d -> ", rows["validation"])


def test_the_summary_compares_no_other_questions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps, path, val_limit in ((1, None, None), (2, "last", 4)):
        caplog.clear()
        callbacks = [StepCheckpoint(), RunSummary(), ValidationValues()]
        trainer = VALIDATES | {"enable_checkpointing": True, "max_epochs": steps}
        data = PromptDataModule(Echo(), val_batch_size=5, val_limit=val_limit)
        fit(tmp_path, callbacks, trainer=trainer, ckpt_path=path, data=data)
    last = intervals_of(tmp_path)[-1]
    assert summary_of(caplog)["validation"] == (
        f"avg@2 {last['avg@2']}, greedy {last['greedy']} (4 questions), after step 2 "
        "(not compared with before training: other questions were asked): mean of Digits"
    )


def test_the_best_checkpoint_has_its_interval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [StepCheckpoint(keep=1, monitor="val/avg@2"), RunSummary(), ValidationValues()]
    fit(tmp_path, callbacks, trainer=VALIDATES | {"enable_checkpointing": True})
    seen = scalars(tmp_path)["val/avg@2"]
    best = max((0, 1, 2), key=seen.__getitem__)
    interval = intervals_of(tmp_path)[best + 1]["avg@2"]
    expected = f"{tmp_path}/checkpoints/step-{best + 1}.ckpt (val/avg@2 {interval} (24 questions))"
    assert summary_of(caplog)["best"] == expected


def test_a_checkpoint_without_intervals_is_continued() -> None:
    summary = RunSummary()
    summary.load_state_dict({"first": (0, {"avg@8": 0.5}), "last": (1, {"avg@8": 0.6}), "measure": "mean of Digits"})
    assert summary.state_dict() == {"first": None, "last": None, "measure": "mean of Digits", "measures": []}


def test_the_summary_compares_with_the_first_although_a_set_is_asked_less_often() -> None:
    """The grader of the other set is another one, so that the two validations have different captions."""
    main, hard = SimpleNamespace(measure="mean of Digits"), SimpleNamespace(measure="mean of Judge")
    scores = {"avg@8": Measurement(0.25, 0.1, 24, "0f"), "hard/avg@8": Measurement(0.5, 0.1, 24, "1f")}
    summary = RunSummary()

    def validated(step: int, module: Any) -> Any:
        trainer: Any = SimpleNamespace(callbacks=[], sanity_checking=False, current_epoch=step, lightning_module=module)
        summary.on_validation_end(trainer, module)
        return summary.state_dict()["first"]

    evaluations = {"": main, "hard": hard}
    asks_both = SimpleNamespace(evaluations=evaluations, measure="val: ...; hard: ...", measurements=lambda: scores)
    asks_main = SimpleNamespace(
        evaluations=evaluations, measure=main.measure, measurements=lambda: {"avg@8": scores["avg@8"]}
    )
    first = validated(0, asks_both)
    assert first[0] == 1 and first[1].keys() == scores.keys()
    assert validated(1, asks_main) == first
    # With another grader the run begins anew.
    main.measure = "mean of Letters"
    assert validated(2, asks_main)[0] == 3


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.385, 0.0412), "0.39 ± 0.04"),
        ((0.9849, 0.0031), "0.985 ± 0.003"),
        ((14.25, 1.3), "14.25 ± 1.30"),
        ((1234.5, 21.7), "1234 ± 22"),
        ((0.5, 0.0), "0.50"),
        ((0.5, math.nan), "0.50"),
        ((0.0, 0.1797, 3), "0.000 ± 0.180"),
    ],
)
def test_an_interval_has_the_digits_that_it_needs(numbers: tuple[float, ...], text: str) -> None:
    assert with_half_width(*numbers) == text  # type: ignore[arg-type]


def test_questions_are_counted_per_validation() -> None:
    scores = {"avg@8": Measurement(0.5, 0.1, 256, ""), "greedy": Measurement(0.6, 0.1, 256, "")}
    scores |= {"math/avg@4": Measurement(0.25, math.nan, 1, "")}
    assert with_questions(scores) == (
        "avg@8 0.50 ± 0.10, greedy 0.60 ± 0.10 (256 questions), math/avg@4 0.25 (1 question)"
    )


def test_the_command_line_prints_lines_and_draws_a_bar_in_a_terminal(
    grpo: Grpo, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, errors = grpo("fit", "--trainer.enable_progress_bar!")
    assert code == 0, errors
    assert [text.partition(":")[0] for text in lines_of(caplog)] == ["before training", "step 1/1"]
    assert "update:" not in out + errors and "stopped: `max_epochs" not in out + errors  # of a bar, of Lightning
    assert summary_of(caplog)["go on"] == "grpo fit --config run/config.yaml --ckpt_path last --trainer.max_epochs 2"
    caplog.clear()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, out, errors = grpo("fit", "--trainer.enable_progress_bar!", "--trainer.default_root_dir=other")
    assert "step 1/1 explore" in out + errors


def test_the_bar_counts_the_completions_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, [StepLines(bar=True)], trainer=VALIDATES | {"max_epochs": 2})
    drawn = capsys.readouterr().out
    assert "step 1/2 explore" in drawn and "step 2/2 explore" in drawn
    assert drawn.rpartition("\r")[2].strip() == "", "no bar stays"
    fit(tmp_path / "other", [StepLines()], trainer=VALIDATES | {"max_epochs": 1})
    assert "explore" not in capsys.readouterr().out


class NoDigits(Reward):
    """Fails on every sample."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        raise RuntimeError("no service")


class Stops(L.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        raise RuntimeError("stop")


def test_a_step_whose_rewards_all_fail_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks: list[L.Callback] = [
        StepLines(),
        FirstLook(),
        RunSummary(),
        SampledCompletions(every_n_steps=1),
        Inspector(every_n_steps=1),
    ]
    callbacks += [StepCheckpoint(keep=1, monitor="reward/mean")]
    callbacks += [EarlyStopping("reward/mean", mode="max", patience=9, check_finite=False)]
    trainer = VALIDATES | {"max_epochs": 2, "enable_checkpointing": True}
    trainer["logger"] = Board(tmp_path, name="", version="")
    fit(tmp_path, callbacks, trainer=trainer, rewards=[NoDigits()], max_failed_rewards=1.0)
    lines = [text for text in lines_of(caplog) if text.startswith("step")]
    assert all("no reward, length " in text for text in lines) and len(lines) == 2
    assert all(math.isnan(value) for value in scalars(tmp_path)["reward/mean"].values())
    assert summary_of(caplog)["done"].startswith("2 of 2 steps")
    # A loop that is used again has no observer of a run that failed.
    loop = GRPOLoop(group_size=4, prompts_per_step=4)
    options = {"callbacks": [StepLines(), Stops(), loop], "max_epochs": 1}
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path / "stops", trainer=options)
    fit(tmp_path / "again", trainer=options | {"callbacks": [loop]})
    assert [type(one).__name__ for one in loop.observers] == ["PromptDataModule"]
