"""What a run shows on the way: completions, configuration and metrics in any logger, the bar, and what stops it."""

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from helpers.chats import TAGS
from helpers.command import Grpo
from helpers.fast import fit
from helpers.fitting import Digits, Echo, events_of, scalars
from helpers.tiny import tokenizer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger

from grpo_lightning import (
    PromptDataModule,
    Question,
    ScriptedEngine,
    StepCheckpoint,
    TrackioLogger,
)
from grpo_lightning.plugins.console.display.summary import curves_of
from grpo_lightning.plugins.looking.loggers.sampled_completions import SampledCompletions, show


class Tables(Logger):
    """A logger that keeps tables and options, with the signatures of Lightning's WandbLogger."""

    name, version = "tables", "0"

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, list[str], list[list[str]]]] = []
        self.options: dict[str, Any] = {}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.options = params

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    # The signature of Lightning's WandbLogger.
    def log_table(self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = 0) -> None:
        assert key == "completions"
        self.tables.append((step, columns, data))


class Trackio:
    """A module with what is used of trackio 0.43, where it was tried."""

    Table = dict

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.ended = 0

    def init(self, project: str, config: dict[str, Any], **options: Any) -> "Trackio":
        self.runs.append({"project": project, "config": dict(config), **options})
        return self

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.ended += 1


LOGGERS: list[Tables] = []


def tables(*args: Any) -> Tables:
    """A logger as the command line makes one; the newest is LOGGERS[-1]."""
    LOGGERS.append(Tables())
    return LOGGERS[-1]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_completions_and_histograms_stand_where_the_steps_scalars_do(tmp_path: Path) -> None:
    shown = SampledCompletions(every_n_steps=2, num_groups=1)
    fit(tmp_path, [shown], loop={"mu": 2}, trainer={"max_epochs": 3})
    events, seen = events_of(tmp_path), scalars(tmp_path)
    assert [event.step for event in events.Tensors("completions/text_summary")] == [0, 2]
    for drawn, metric in (("rollout/length", "rollout/length_mean"), ("reward/total", "reward/mean")):
        found = {event.step: event.histogram_value for event in events.Histograms(drawn)}
        means = {step: value.sum / value.num for step, value in found.items()}
        assert means == pytest.approx({step: seen[metric][step] for step in (0, 2)})


def test_completions_reach_the_file_and_every_logger_that_shows_text(tmp_path: Path) -> None:
    shown, board = Tables(), TensorBoardLogger(tmp_path / "several", name="", version="")
    loggers: dict[str, Any] = {"none": False, "several": [CSVLogger(tmp_path / "several"), board, shown]}
    engine = ScriptedEngine(lambda request, text: f"{request.sample}ab")
    for kind, logger in loggers.items():
        trainer = {"max_epochs": 2, "logger": logger}
        fit(tmp_path / kind, [SampledCompletions(every_n_steps=1, num_groups=1)], engine=engine, trainer=trainer)
        found = lines_of(tmp_path / kind)
        assert [line["step"] for line in found] == [1] * 4 + [2] * 4
        assert [line["completion"] for line in found[:4]] == [f"{place}ab" for place in range(4)]
        assert found[0]["scores"] == {"digits": found[0]["reward"]} and found[0]["statuses"] == {"digits": "ok"}
        assert found[0]["reward"] == pytest.approx(1 / 3) and found[0]["answer"] == "3"
    assert [step for step, _, _ in shown.tables] == [0, 1]
    _, columns, rows = shown.tables[0]
    assert columns == ["prompt", "gold", "completion", "ended", "reward", "digits"]
    assert [row[2] for row in rows] == [f"{place}ab" for place in range(4)]
    assert rows[0][4:] == ["0.33", "0.33 ok"]
    text = events_of(tmp_path / "several").Tensors("completions/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("| prompt | gold | completion | ended | reward | digits |\n| --- |")
    assert "| 3ab | 3 | 0ab | stop | 0.33 | 0.33 ok |" in text


def test_mlflow_gets_a_page_and_a_logger_without_text_nothing() -> None:
    calls: list[Any] = []
    page = "| prompt | reward |\n| --- | --- |\n| 1&#124;2 | 0.50 |"
    mlflow = SimpleNamespace(run_id="r7", experiment=SimpleNamespace(log_text=lambda *a: calls.append(a)))
    for logger in (mlflow, SimpleNamespace(experiment=SimpleNamespace()), SimpleNamespace()):
        show(logger, [["prompt", "reward"], ["1|2", "0.50"]], 3)
    assert calls == [("r7", page, "completions/step-4.md")]


def test_the_file_survives_a_kill_and_a_resume_without_doubles(tmp_path: Path) -> None:
    def go(folder: Path, steps: int, resume: str | None = None) -> None:
        trainer = {"max_epochs": steps, "enable_checkpointing": True}
        fit(folder, [StepCheckpoint(), SampledCompletions(every_n_steps=1)], trainer=trainer, ckpt_path=resume)

    go(tmp_path / "whole", 3)
    go(tmp_path / "cut", 2)
    shutil.copytree(tmp_path / "cut" / "checkpoints", tmp_path / "saved")
    go(tmp_path / "cut", 3, "last")
    # Killed after step 3 had written its completions and begun another line, before its checkpoint. The third line
    # has line separators of Unicode, which JSON may hold.
    shutil.rmtree(tmp_path / "cut" / "checkpoints")
    shutil.copytree(tmp_path / "saved", tmp_path / "cut" / "checkpoints")
    file = tmp_path / "cut" / "completions.jsonl"
    lines = file.read_text().splitlines()
    strange = json.dumps({"step": 1, "completion": "a\u2028b\u2029c\u0085d"}, ensure_ascii=False)
    file.write_text("\n".join([*lines[:2], strange, *lines[2:], "", '{"step": 2, "upd']))
    go(tmp_path / "cut", 3, "last")
    whole = (tmp_path / "whole" / "completions.jsonl").read_text().splitlines()
    assert file.read_text() == "\n".join([*whole[:2], strange, *whole[2:], ""])


def test_half_a_character_does_not_end_the_run(tmp_path: Path) -> None:
    class Half(Echo):
        def questions(self, split: str) -> list[Question]:
            return [replace(question, answer="3\ud83d") for question in super().questions(split)]

    fit(tmp_path, [SampledCompletions(every_n_steps=1)], trainer={"max_epochs": 1}, data=PromptDataModule(Half()))
    assert {line["answer"] for line in lines_of(tmp_path)} == {"3\ud83d"}


def test_every_logger_gets_the_options(grpo: Grpo, tmp_path: Path) -> None:
    (tmp_path / "loggers.yaml").write_text("trainer: {logger: [{class_path: test_loggers.tables}, CSVLogger]}")
    grpo.ok("fit", "--config=loggers.yaml")
    assert LOGGERS[-1].options["model"]["objective"]["beta"] == 0
    assert LOGGERS[-1].options["loop"]["group_size"] == 2
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["loop"]["group_size"] == 2
    assert len(LOGGERS[-1].tables) == 1


# The bar.


def test_an_error_has_a_line_of_its_own_below_a_bar(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    both = io.StringIO()  # stdout and stderr in the order in which a terminal shows them
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    Path("fails.py").write_text("def score(sample):\n    raise KeyError\n")
    reward = ["--model.rewards+=FunctionReward", "--model.rewards.function=fails.py:score"]
    assert grpo("fit", "--trainer.enable_progress_bar=true", *reward)[0] == 1
    lines = [line.rpartition("\r")[2] for line in both.getvalue().split("\n")]
    (line,) = [line for line in lines if "grpo: error" in line]
    assert line.startswith("grpo: error: reward score failed")


# Monitors.


@pytest.mark.parametrize("callback", ["EarlyStopping", "ModelCheckpoint"])
def test_a_metric_that_is_not_there_is_a_mistake(grpo: Grpo, callback: str) -> None:
    watch = [f"--trainer.callbacks+={callback}", "--trainer.callbacks.monitor=val/rewards"]
    code, _, errors = grpo("fit", *watch)
    assert code == 2 and "Traceback" not in errors
    assert "val/rewards" in errors.splitlines()[-1] and "val/greedy" in errors.splitlines()[-1]
    code, _, errors = grpo("fit", *watch, "--trainer.limit_val_batches=0")
    assert code == 2 and f"{callback}.monitor=val/rewards: the run has no validation" in errors


def test_early_stopping_says_that_it_stopped_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStopping("reward/mean", mode="max", patience=2, check_on_train_epoch_end=True)
    falls = Digits(change=lambda sample, share: float(sample.prompt.id < 4))  # 1 in the first step and then 0
    fit(tmp_path, [stopping], rewards=[falls], trainer={"max_epochs": 9})
    (line,) = [message for message in caplog.messages if message.startswith("EarlyStopping")]
    assert line == (
        "EarlyStopping: stopped after step 3. Monitored metric reward/mean did not improve in the last 2 records. "
        "Best score: 1.000."
    )


# The rest.


def test_an_answer_prefix_is_recorded(grpo: Grpo, tmp_path: Path) -> None:
    chat = tokenizer()
    chat.chat_template = TAGS
    chat.save_pretrained(tmp_path / "policy")
    (tmp_path / "own.py").write_text(
        "def own(sample):\n"
        "    assert sample.prompt.endswith('<assistant>ab'), sample.prompt\n"
        "    assert sample.turn == 'ab' + sample.text, sample.turn\n"
        "    return len(sample.text)\n"
    )
    reward = "[{class_path: FunctionReward, init_args: {function: own.py:own}}]"
    options = ["--data.chat=true", "--data.answer_prefix=ab", f"--model.rewards={reward}"]
    grpo.ok("fit", *options)
    lines = lines_of(tmp_path / "run")
    assert lines and {line["answer_prefix"] for line in lines} == {"ab"}
    assert {line["statuses"]["own"] for line in lines} == {"ok"}


def test_trackio_is_one_word(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", trackio := Trackio())
    options = ["--trainer.default_root_dir=arm/1", "--completions.every_n_steps=1", "--trainer.logger=TrackioLogger"]
    for steps in (1, 2):
        grpo.ok("fit", *options, f"--trainer.max_epochs={steps}", "--ckpt_path=last")
    assert [(run["name"], run["resume"]) for run in trackio.runs] == [("arm/1", "never"), ("arm/1", "allow")]
    assert trackio.runs[0]["config"]["loop"]["group_size"] > 1 and trackio.ended == 2
    table = next(metrics["completions"] for _, metrics in trackio.rows if "completions" in metrics)
    assert {len(row) for row in table["data"]} == {len(table["columns"])}
    assert {step for step, metrics in trackio.rows if "reward/mean" in metrics} == {0, 1}
    assert any(step == -1 and "val/avg@2" in metrics for step, metrics in trackio.rows)  # waited for the options
    assert curves_of(TrackioLogger("two words")) == "trackio show --project 'two words'"
    assert curves_of(TrackioLogger(space_id="a/b")) == "https://huggingface.co/spaces/a/b"
