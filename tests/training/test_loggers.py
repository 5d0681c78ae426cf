"""What a run shows on the way: completions, configuration and metrics in any logger, the bar, and what stops it."""

import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import yaml
from helpers.command import Grpo
from helpers.fitting import Digits, Echo, fit, scalars
from helpers.tiny import tokenizer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.scripted import ScriptedEngine
from grpo_lightning.maths.corrections import TruncatedRatio
from grpo_lightning.maths.objective import Objective
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.training import step_statistics as statistics
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.training.callbacks.completions import SampledCompletions, show
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.stale import StaleSource
from grpo_lightning.types import Question, Sample, UsageError


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

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        assert key == "completions" and columns is not None and data is not None and step is not None
        self.tables.append((step, columns, data))


LOGGERS: list[Tables] = []


def tables(*args: Any) -> Tables:
    """A logger as the command line makes one; the newest is LOGGERS[-1]."""
    LOGGERS.append(Tables())
    return LOGGERS[-1]


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "histograms": 0, "scalars": 0})
    events.Reload()
    return events


SHORT: dict[str, Any] = {"loop": {"mu": 2}, "trainer": {"max_epochs": 3}}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_completions_and_histograms_stand_where_the_steps_scalars_do(tmp_path: Path) -> None:
    fit(tmp_path, [SampledCompletions(every_n_steps=2, num_groups=1)], **SHORT)
    events, seen = events_of(tmp_path), scalars(tmp_path)
    assert [event.step for event in events.Tensors("completions/text_summary")] == [0, 2]
    lengths = {event.step: event.histogram_value for event in events.Histograms("rollout/length")}
    assert {step: value.sum / value.num for step, value in lengths.items()} == pytest.approx(
        {step: seen["rollout/length_mean"][step] for step in (0, 2)}
    )
    totals = {event.step: event.histogram_value for event in events.Histograms("reward/total")}
    assert totals[2].sum / totals[2].num == pytest.approx(seen["reward/mean"][2])


def test_completions_reach_every_logger_that_shows_text_and_always_a_file(tmp_path: Path) -> None:
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
    head, _, page = text.partition("\n\n")
    assert head.endswith(f"`grpo inspect {tmp_path / 'several'}`")
    assert page.startswith("**prompt**\n\n> 3ab\n\n**gold** 3\n\n| reward | ended | digits | completion |")
    assert "| 0.33 | stop | 0.33&nbsp;ok | <strong>0ab</strong> |" in text


def test_a_logger_takes_the_table_in_its_own_way() -> None:
    calls: list[Any] = []
    table, page = [["prompt", "reward"], ["1|2", "0.50"]], "a page"
    mlflow = SimpleNamespace(run_id="r7", experiment=SimpleNamespace(log_text=lambda *a: calls.append(a)))
    show(SimpleNamespace(log_table=lambda **given: calls.append(given)), table, page, 3)
    show(mlflow, table, page, 3)
    show(SimpleNamespace(experiment=SimpleNamespace(add_text=lambda *a: calls.append(a))), table, page, 3)
    show(SimpleNamespace(experiment=SimpleNamespace()), table, page, 3)
    show(SimpleNamespace(), table, page, 3)
    assert calls == [
        {"key": "completions", "columns": table[0], "data": table[1:], "step": 3},
        ("r7", page, "completions/step-4.md"),
        ("completions", page, 3),
    ]


def test_the_file_survives_a_kill_and_a_resume_without_doubles(tmp_path: Path) -> None:
    def go(folder: Path, steps: int, resume: str | None = None) -> None:
        trainer = {"max_epochs": steps, "enable_checkpointing": True}
        fit(folder, [StepCheckpoint(), SampledCompletions(every_n_steps=1)], trainer=trainer, ckpt_path=resume)

    go(tmp_path / "whole", 3)
    go(tmp_path / "cut", 2)
    shutil.copytree(tmp_path / "cut" / "checkpoints", tmp_path / "saved")
    go(tmp_path / "cut", 3, "last")
    # Killed after step 3 had written its completions and begun another line, before its checkpoint.
    shutil.rmtree(tmp_path / "cut" / "checkpoints")
    shutil.copytree(tmp_path / "saved", tmp_path / "cut" / "checkpoints")
    with (tmp_path / "cut" / "completions.jsonl").open("a") as file:
        file.write('{"step": 2, "upd')
    go(tmp_path / "cut", 3, "last")
    assert (tmp_path / "cut" / "completions.jsonl").read_bytes() == (
        tmp_path / "whole" / "completions.jsonl"
    ).read_bytes()
    assert sorted({line["step"] for line in lines_of(tmp_path / "cut")}) == [1, 2, 3]


def test_what_a_model_writes_does_not_break_the_file(tmp_path: Path) -> None:
    def go(steps: int, resume: str | None = None) -> None:
        fit(
            tmp_path,
            [StepCheckpoint(), SampledCompletions(every_n_steps=1)],
            trainer={"max_epochs": steps, "enable_checkpointing": True},
            ckpt_path=resume,
        )

    go(1)
    file = tmp_path / "completions.jsonl"
    first = file.read_text()
    # Line separators of Unicode, which JSON may hold, and a line that is none.
    strange = json.dumps({"step": 1, "completion": "a\u2028b\u2029c\u0085d"}, ensure_ascii=False)
    file.write_text(f"{first}{strange}\n\n")
    go(2, "last")
    assert file.read_text().startswith(f"{first}{strange}\n{{")


def test_half_a_character_does_not_end_the_run(tmp_path: Path) -> None:
    class Half(Echo):
        def questions(self, split: str) -> list[Question]:
            return [replace(question, answer="3\ud83d") for question in super().questions(split)]

    fit(tmp_path, [SampledCompletions(every_n_steps=1)], trainer={"max_epochs": 1}, data=PromptDataModule(Half()))
    assert {line["answer"] for line in lines_of(tmp_path)} == {"3\ud83d"}


def test_every_logger_gets_the_options(grpo: Grpo, tmp_path: Path) -> None:
    (tmp_path / "loggers.yaml").write_text("trainer: {logger: [{class_path: test_loggers.tables}, CSVLogger]}")
    code, _, errors = grpo("fit", "--config=loggers.yaml")
    assert code == 0, errors
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


class Logs(L.Callback):
    """A user's callback with a metric of its own."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("mine", float(trainer.current_epoch))


def test_a_metric_of_ones_own_may_be_watched(tmp_path: Path) -> None:
    watching = StepCheckpoint(keep=1, monitor="mine")
    fit(tmp_path, [Logs(), watching], trainer={"max_epochs": 2, "enable_checkpointing": True})
    assert (tmp_path / "checkpoints" / "step-2.ckpt").exists()
    with pytest.raises(UsageError, match="val/mine"):
        fit(tmp_path / "typo", [Logs(), StepCheckpoint(monitor="val/mine")], trainer={"enable_checkpointing": True})


@pytest.mark.parametrize(
    ("options", "trainer", "logs"),
    [
        ({"objective": Objective(correction=TruncatedRatio(1.02))}, {}, True),
        ({"sampling": Sampling(max_new_tokens=12, top_p=0.9)}, {"precision": "bf16-mixed"}, False),
        ({"loop": {"source": StaleSource(1)}}, {}, True),
        ({}, {}, False),
    ],
    ids=["corrected", "rounded and filtered", "late", "exact"],
)
def test_a_mismatch_is_logged_where_sampler_and_policy_may_differ(
    options: dict[str, Any], trainer: dict[str, Any], logs: bool, tmp_path: Path
) -> None:
    fit(tmp_path, trainer=trainer | {"max_epochs": 2}, **options)
    assert any(name.startswith("mismatch/") for name in events_of(tmp_path).Tags()["scalars"]) == logs


class Falls(Digits):
    """A reward that is 1 in the first step and then 0."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        values = [float(samples[0].prompt.id < 4)] * len(samples)
        return RewardResult(values, ["ok"] * len(values), [""] * len(values))


def test_early_stopping_says_that_it_stopped_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStopping("reward/mean", mode="max", patience=2, check_on_train_epoch_end=True)
    fit(tmp_path, [stopping], rewards=[Falls()], trainer={"max_epochs": 9})
    (line,) = [message for message in caplog.messages if message.startswith("EarlyStopping")]
    assert line == (
        "EarlyStopping: stopped after step 3. Monitored metric reward/mean did not improve in the last 2 records. "
        "Best score: 1.000."
    )


# The rest.


def test_a_chat_template_without_a_system_turn_ends_in_a_message(grpo: Grpo, tmp_path: Path) -> None:
    chat = tokenizer()
    chat.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    chat.save_pretrained(tmp_path / "policy")
    code, _, errors = grpo("fit", "--data.chat=true", "--data.system=12")
    assert code == 2 and "Traceback" not in errors
    line = errors.splitlines()[-1]
    assert all(word in line for word in ("data.system='12'", "System role not supported", "data.template"))
    assert not (tmp_path / "run").exists()


def test_peak_memory_is_in_gib_on_linux_and_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    used = SimpleNamespace(ru_maxrss=3 * 2**20)
    monkeypatch.setattr(statistics.resource, "getrusage", lambda who: used)
    monkeypatch.setattr(statistics.sys, "platform", "linux")
    assert statistics.peak_memory_gib(torch.device("cpu")) == 3
    used.ru_maxrss = 3 * 2**30
    monkeypatch.setattr(statistics.sys, "platform", "darwin")
    assert statistics.peak_memory_gib(torch.device("cpu")) == 3
