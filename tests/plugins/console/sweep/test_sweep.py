"""`grpo sweep`: the experiment's file, the runs in processes of their own, and what ends them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command import Grpo, parser_of_options
from helpers.experiments import option, write_experiment
from helpers.paths import ROOT
from helpers.waiting import LIMIT, wait_until
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning.plugins.console.sweep import sweep_command
from grpo_lightning.plugins.console.sweep.experiment import Experiment
from grpo_lightning.plugins.console.sweep.sweep_runs import Children
from grpo_lightning.types import UsageError

ARMS = {
    "no KL": None,
    "beta 0.04": {"model.objective.beta": 0.04},
    "Dapo!": {"config": "configs/dapo.yaml", "trainer.max_epochs": 5, "loop.shuffle": True},
}

EXPERIMENT = {
    "config": ["configs/quickstart.yaml"],
    "args": {"trainer.max_epochs": 3, "model.rewards": [{"class_path": "MathVerifier"}]},
    "seeds": [0, 7],
    "arms": ARMS,
    "metrics": ["val/x"],
}


def write(folder: Path, **changes: object) -> Path:
    """An experiment's folder; a key that is None is left out."""
    return write_experiment(folder, EXPERIMENT | changes)


def fake_call(children: Children, arguments: list[str], log: Path) -> int:
    """Logs max_epochs + seed as val/x; seed 7 of the arm with beta fails, and the option `nonsense` is refused."""
    has_beta = any(argument.startswith("--model.objective.beta=") for argument in arguments)
    seed = int(option(arguments, "seed_everything"))
    if arguments[-1] == "--print_config":
        refuses = any(argument.startswith("--nonsense") for argument in arguments)
        log.write_text("grpo: error: nonsense: there is no such option\n" if refuses else "trainer: {}\n")
        return 2 if refuses else 0
    if has_beta and seed == 7:
        log.write_text("working\ngrpo: error: beta=0.04: too much\n")
        return 2
    log.write_text("working\n")
    with SummaryWriter(option(arguments, "trainer.default_root_dir")) as writer:
        writer.add_scalar("epoch", 0, 0)
        writer.add_scalar("val/x", int(option(arguments, "trainer.max_epochs")) + seed, 0)
    return 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an experiment whose runs are made by `fake_call`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Children, "call", fake_call)
    return write(tmp_path / "rates")


def test_a_grid_crosses_every_arm(tmp_path: Path) -> None:
    grid = {"model.optimizer.lr": [1e-4, 3e-4], "loop.stop": ["FixedPasses", "KLAbove"]}
    crossed = Experiment.read(write(tmp_path / "crossed", arms={"mu 1": {"loop.mu": 1}, "mu 2": {}}, grid=grid))
    assert [*crossed.arms][:5] == [
        *(f"mu 1, lr {lr}, stop {stop}" for lr in ("0.0001", "0.0003") for stop in ("FixedPasses", "KLAbove")),
        "mu 2, lr 0.0001, stop FixedPasses",
    ]
    run = crossed.run("mu 1, lr 0.0003, stop KLAbove", 7, Path("runs"))
    assert run.args[-5:-2] == ["--loop.mu=1", "--model.optimizer.lr=0.0003", "--loop.stop=KLAbove"]
    assert run.folder == Path("runs/mu_1_lr_0.0003_stop_klabove/7")
    alone = Experiment.read(write(tmp_path / "alone", arms=None, grid={"loop.mu": [1, 4]}))
    assert alone.arms == {"mu 1": {"loop.mu": 1}, "mu 4": {"loop.mu": 4}}
    assert (crossed.name, alone.name) == ("crossed", "alone")
    # Two runs in one folder would write the same files.
    assert Experiment.read(write(tmp_path / "twice", seeds=[3, 0, 3])).seeds == [3, 0]


def test_an_arms_file_and_options_override_those_of_every_run(tmp_path: Path) -> None:
    runs = Experiment.read(write(tmp_path / "e")).runs(Path("runs/e"))
    assert [(run.arm, run.seed) for run in runs] == [(arm, seed) for seed in (0, 7) for arm in ARMS]
    command, *flags, folder = runs[2].args
    assert [command, *flags[:2]] == ["fit", "--config=configs/quickstart.yaml", "--config=configs/dapo.yaml"]
    assert flags[-4:] == [
        '--model.rewards=[{"class_path": "MathVerifier"}]',
        *("--trainer.max_epochs=5", "--loop.shuffle=true", "--seed_everything=0"),
    ]
    assert folder == "--trainer.default_root_dir=runs/e/dapo/0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"a b": {}, "A-B": {}}}, "letters and digits differ"),
        ({"arms": {}}, "the arms need names"),
        ({"seeds": []}, "one seed or more"),
        ({"seeds": 3}, "one seed or more as a list, not 3"),
        ({"seeds": ["a"]}, "one seed or more as a list"),
        ({"arms": ["a", "b"]}, r"give names and values, not \['a', 'b'\]"),
        ({"arms": {"a": {}, "b": 3}}, "give names and values, not 3"),
        ({"args": ["trainer.max_epochs"]}, "give names and values"),
        ({"grid": ["loop.mu"]}, "give names and values"),
        ({"grid": {"loop.mu": 2}}, "give a list of values for each option, not 2"),
        ({"arms": None}, "give seeds, and arms or a grid"),
        ({"metric": ["val/x"]}, "nothing else"),
        ({"metrics": ["val/x:median"]}, "metric 'val/x:median'"),
        ({"x": "hours"}, "x: hours: give any of step"),
        ({"arms": {"base": {}, "odd": {"nonsense": 1}}}, "^odd: grpo: error: nonsense: there is no such option$"),
    ],
)
def test_mistakes_show_before_anything_runs(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sweep_command.main([str(write(folder, **changes))])
    assert [path.name for path in Path().glob("runs/rates/*")] in ([], [".sweep.lock"])


EXPERIMENTS = sorted(ROOT.glob("experiments/*/experiment.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.parent.name)
def test_experiments_of_the_repository_have_known_options(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend("")  # as for `python -m`: where the configuration is
    experiment = Experiment.read(path.parent)
    parser = parser_of_options()
    for run in experiment.runs(Path("runs/experiments/e"))[: len(experiment.arms)]:
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([*run.args, "--print_config"])
        assert ended.value.code == 0


def test_runs_are_made_compared_and_kept(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(folder, arms={"base": {}, "longer": {"trainer.max_epochs": 5}})
    assert sweep_command.main([str(folder)]) == 0
    out = capfd.readouterr().out
    assert "4 runs, 4 to make" in out and "longer, seed 7: 0 s" in out and "working" not in out
    assert Path("runs/rates/base/0/log.txt").read_text() == "working\n"
    assert set(json.loads(Path("runs/rates/base/0/done.json").read_text())) == {"arguments", "seconds"}
    # 3 and 10 have the mean 6.5, 5 and 12 the mean 8.5.
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert any("base" in row for row in rows) and any("longer" in row for row in rows)
    assert Path("runs/rates/report.html").exists()

    marks = {path: path.stat().st_mtime_ns for path in Path().glob("runs/rates/*/*/done.json")}
    Path("runs/rates/base/7/done.json").unlink()  # as if interrupted
    Path("runs/rates/base/7/left_over").touch()
    sweep_command.main([str(folder)])
    out = capfd.readouterr().out
    assert "4 runs, 1 to make" in out and "1/1 base, seed 7" in out
    assert not Path("runs/rates/base/7/left_over").exists()
    remade = {path for path, mark in marks.items() if path.stat().st_mtime_ns != mark}
    assert remade == {Path("runs/rates/base/7/done.json")}

    write(folder, arms={"base": {}, "longer": {"trainer.max_epochs": 6}})
    sweep_command.main([str(folder), "--out", "runs/rates"])
    assert "4 runs, 2 to make" in capfd.readouterr().out
    sweep_command.main([str(folder), "--again"])
    assert "4 runs, 4 to make" in capfd.readouterr().out
    sweep_command.main([str(folder), "--again", "--dry-run"])
    assert len(capfd.readouterr().out.splitlines()) == 4


def test_a_run_that_fails_says_why_and_the_others_count(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"1 of 6 runs failed: beta 0\.04, seed 7"):
        sweep_command.main(["rates"])
    out = capfd.readouterr().out
    reason = "grpo: error: beta=0.04: too much (exit status 2). See runs/rates/beta_0.04/7/log.txt"
    assert f"beta 0.04, seed 7: failed: {reason}" in out
    assert not Path("runs/rates/beta_0.04/7/done.json").exists()


def test_a_folder_that_is_no_run_is_left_alone(folder: Path) -> None:
    Path("runs/rates/no_kl/0").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no_kl/0: this is no run of a sweep"):
        sweep_command.main(["rates", "--again"])


def test_two_sweeps_in_one_folder_are_refused(folder: Path) -> None:
    with sweep_command.locked(Path("runs/rates")), pytest.raises(UsageError, match="another sweep is making these"):
        sweep_command.main(["rates"])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "grpo_lightning", *arguments]


def test_runs_end_with_the_sweep(grpo: Grpo, tmp_path: Path) -> None:
    """In processes, with a reward that never returns: SIGTERM ends the sweep and its run, and nothing is complete."""
    Path("endless.py").write_text(
        "import os, pathlib, time\n"
        "from grpo_lightning import FormatReward\n"
        "class Endless(FormatReward):\n"
        "    def score(self, samples):\n"
        "        pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "        time.sleep(1000)\n"
    )
    options = {
        **{"trainer.accelerator": "cpu", "trainer.max_epochs": 1, "trainer.limit_val_batches": 0},
        **{"model.policy.path": "policy", "model.rewards": [{"class_path": "endless.Endless"}]},
        **{"model.sampling.max_new_tokens": 4, "data.task": "JsonPrompts", "data.task.train": "rows.jsonl"},
        **{"loop.group_size": 2, "loop.prompts_per_step": 2},
    }
    content = {"args": options, "arms": {"one": {}}, "seeds": [0]}
    Path("endless.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    sweep = subprocess.Popen(command("sweep", "endless.yaml"), env=variables, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: sweep.poll() is not None or (Path("pid").exists() and Path("pid").read_text()))
    assert sweep.poll() is None
    child = int(Path("pid").read_text())
    sweep.send_signal(signal.SIGTERM)
    _, errors = sweep.communicate(timeout=LIMIT)
    assert sweep.returncode == 130 and "interrupted; complete runs are kept" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not Path("runs/endless/one/0/done.json").exists()
