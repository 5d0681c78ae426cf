"""Each start of a run is kept with what made it, and says what it has changed: command line, Python, ranks, SIGKILL."""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.command import Grpo, arguments, furnish
from helpers.fitting import Digits, checkpoint_of, fit
from helpers.paths import ROOT, environment
from helpers.programs import programs, succeed
from helpers.waiting import LIMIT
from lightning import __version__ as lightning_version

from grpo_lightning import JsonPrompts, Objective, Provenance, StepCheckpoint
from grpo_lightning.command.overview import answer
from grpo_lightning.plugins.looking.inspector import read
from grpo_lightning.plugins.looking.run_files.provenance import commit_of, hash_of, read_starts

LAST = "run/checkpoints/last.ckpt"
HEAD = "with these changes:"


def changes_in(messages: Sequence[str]) -> list[str]:
    """The sorted lines of the messages about changes."""
    return sorted(line.strip() for message in messages if HEAD in message for line in message.splitlines()[1:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one step, from a shell."""
    folder = tmp_path_factory.mktemp("provenance")
    furnish(folder)
    options = arguments(
        "fit", "--inspect.every_n_steps=1", "--seed_everything=7", "--model.policy.trust_remote_code=false"
    )
    command = [sys.executable, "-m", "grpo_lightning", *options]
    ran = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    assert HEAD not in ran.stdout + ran.stderr
    return folder


@pytest.fixture
def begun(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run, in a working directory that may be changed."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_entry_says_what_made_the_run(begun: Path) -> None:
    (start,) = read_starts("run")
    assert [*start] == [
        *("step", "time", "grpo_lightning", "commit", "torch", "transformers", "lightning", "python", "cpu", "gpu"),
        *("command", "seed", "world_size", "precision", "data"),
    ]
    assert start["command"].startswith("python -m grpo_lightning fit --trainer.accelerator=cpu ")
    assert start["torch"] == torch.__version__
    assert start["lightning"] == lightning_version
    assert start["python"] == ".".join(map(str, sys.version_info[:3]))
    assert torch.backends.cpu.get_cpu_capability() in start["cpu"]
    assert start["commit"] == commit_of(ROOT)
    assert (start["step"], start["seed"], start["world_size"], start["precision"]) == (0, 7, 1, "32-true")
    questions = hash_of(JsonPrompts(train="rows.jsonl").questions("train"))
    assert start["data"] == {"train": questions, "val": questions}


@pytest.mark.usefixtures("begun")
def test_checkpoint_record_and_card_have_the_entry(capsys: pytest.CaptureFixture[str]) -> None:
    starts = read_starts("run")
    assert checkpoint_of(Path("run"))["provenance"]["starts"] == starts
    assert [record.provenance for record in read("run")] == starts * 2
    assert answer(["export", "run", "--out=exported"]) == 0
    card = Path("exported", "README.md").read_text()
    assert yaml.safe_load(card.partition("Each start of the run:")[2]) == starts


@pytest.mark.usefixtures("begun")
def test_env_prints_what_made_a_run_and_what_differs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["env", "--run=run"]) == 0
    printed = capsys.readouterr().out
    (start,) = read_starts("run")
    lines = printed.splitlines()
    assert lines[0] == "start 1: after step 0"
    assert f"  data.train: {start['data']['train']}" in lines
    assert "  gpu: none" in lines or torch.cuda.is_available()
    assert lines[-1] == "differs here from the newest start: nothing"
    path = Path("run", "provenance.yaml")
    later = start | {"torch": "1.0", "commit": "abc", "step": 1}
    path.write_text(yaml.safe_dump([start, later]))
    assert answer(["env", "--run=run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  torch: 1.0 (here: {torch.__version__})" in lines
    assert "start 2: after step 1" in lines
    assert lines[-1] == "differs here from the newest start: commit, torch"


def test_env_of_a_folder_without_provenance_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["env", f"--run={tmp_path}"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"{tmp_path}: it has no provenance.yaml" in message


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("run", ["run", "new"])
def test_a_start_tells_each_changed_option_in_any_folder(
    run: str, command: Grpo, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Path("rows.jsonl").read_text().splitlines(keepends=True)
    Path("other.jsonl").write_text("".join(rows[:-1]))
    options = ["--seed_everything=7", "--trainer.max_epochs=2", "--loop.group_size=4", "--data.task.train=other.jsonl"]
    options += ["--model.objective.surrogate=Reinforce"]
    command.ok("fit", f"--ckpt_path={LAST}", f"--trainer.default_root_dir={run}", "--inspect.every_n_steps=1", *options)
    questions = [hash_of(JsonPrompts(train=name).questions("train")) for name in ("rows.jsonl", "other.jsonl")]
    expected = [
        "data.task.train rows.jsonl -> other.jsonl",
        f"data.train {questions[0]} -> {questions[1]}",
        "loop.group_size 2 -> 4",
        "model.objective.surrogate Clipped -> Reinforce",
        "trainer.max_epochs 1 -> 2",
    ]
    changes = changes_in(caplog.messages)
    clip_options = [change for change in changes if change.startswith("model.objective.surrogate.")]
    assert clip_options and all(change.endswith("-> not set") for change in clip_options)
    folder_change = [] if run == "run" else ["trainer.default_root_dir run -> new"]
    assert [change for change in changes if change not in clip_options] == sorted(expected + folder_change)
    starts = read_starts(run)
    assert [start["step"] for start in starts] == [0, 1]
    assert starts[0] == read_starts("run")[0]
    assert checkpoint_of(Path(run))["provenance"]["starts"] == starts


def test_the_grader_of_the_task_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Grpo, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ["--loop.prompts_per_step=1", "--loop.group_size=2", "--data.val_limit=1", "--trainer.max_epochs=1"]
    command.ok("fit", "--config=grpo_lightning:quickstart", *tiny, "--trainer.default_root_dir=sums")
    assert yaml.safe_load(Path("sums/config.yaml").read_text())["model"]["validation"]["grader"]
    options = ["--trainer.max_epochs=2", "--model.optimizer.lr=1e-5", "--ckpt_path=last"]
    command.ok("fit", "--config=sums/config.yaml", *options)
    # The quickstart's rate is 3e-4.
    assert changes_in(caplog.messages) == ["model.optimizer.lr 0.0003 -> 1e-05", "trainer.max_epochs 1 -> 2"]


@pytest.mark.usefixtures("begun")
def test_a_start_with_the_same_options_tells_nothing(command: Grpo, caplog: pytest.LogCaptureFixture) -> None:
    command.ok("fit", "--config=run/config.yaml", "--trainer.max_epochs=2", "--ckpt_path=last")
    assert changes_in(caplog.messages) == ["trainer.max_epochs 1 -> 2"]
    caplog.clear()
    # Another version, and a checkpoint of a version that kept nothing.
    checkpoint = torch.load(LAST, weights_only=True)
    checkpoint["provenance"]["starts"][-1]["transformers"] = "1.0"
    torch.save(checkpoint, "other.ckpt")
    new = ["--config=run/config.yaml", "--trainer.max_epochs=3", "--trainer.default_root_dir=run"]
    command.ok("fit", *new, "--ckpt_path=other.ckpt", "--trainer.default_root_dir=new")
    (change,) = (change for change in changes_in(caplog.messages) if change.startswith("transformers"))
    assert change.startswith("transformers 1.0 -> ")
    caplog.clear()
    del checkpoint["provenance"]
    torch.save(checkpoint, LAST)
    command.ok("fit", *new, "--ckpt_path=last")
    assert changes_in(caplog.messages) == ["trainer.max_epochs 2 -> 3"]
    assert [start["step"] for start in read_starts("run")] == [0, 1, 2]


def test_a_killed_run_on_two_ranks_has_two_starts_in_one_file(tmp_path: Path) -> None:
    furnish(tmp_path)
    kills = ["Fails", "phase=saving", "rank=-1", "kind=kill", "step=2"]
    dies = ["--trainer.callbacks+=helpers.failing.Fails", *(f"--trainer.callbacks.{text}" for text in kills[1:])]
    options = ["--trainer.max_epochs=2", "--trainer.devices=2", "--trainer.strategy=ddp"]
    with programs({"run": arguments("fit", *options, *dies)}, tmp_path) as started:
        assert started["run"].wait() != 0
    run = tmp_path / "run"
    (first,) = read_starts(run)
    succeed({"run": arguments("fit", *options, "--ckpt_path=last")}, tmp_path)
    starts = read_starts(run)
    assert starts[0] == first
    assert [(start["step"], start["world_size"]) for start in starts] == [(0, 2), (1, 2)]
    assert len([*run.rglob("*provenance*")]) == 1


def test_a_run_in_python_tells_what_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def go(steps: int, path: Path | None, folder: str, **options: Any) -> None:
        callbacks = [StepCheckpoint(), Provenance()]
        fit(tmp_path / folder, callbacks, trainer={"max_epochs": steps}, ckpt_path=path, **options)

    def adam(lr: float) -> Any:
        return lambda parameters: torch.optim.AdamW(parameters, lr=lr)

    path = tmp_path / "old" / "checkpoints" / "last.ckpt"
    go(1, None, "old", optimizer=adam(0.1))
    assert changes_in(caplog.messages) == []
    rewards = [Digits(weight=2.0)]
    go(2, path, "new", optimizer=adam(0.2), rewards=rewards, objective=Objective(beta=0.1), loop={"mu": 2})
    assert changes_in(caplog.messages) == sorted(
        [
            "loop.mu 1 -> 2",
            "model.objective.beta 0.0 -> 0.1",
            "model.optimizer.lr 0.1 -> 0.2",
            "model.reference None -> FrozenCopy",
            "model.rewards.0.weight 1.0 -> 2.0",
            f"trainer.default_root_dir {tmp_path / 'old'} -> {tmp_path / 'new'}",
            "trainer.max_epochs 1 -> 2",
        ]
    )
    assert [start["step"] for start in read_starts(tmp_path / "new")] == [0, 1]
