import json
from pathlib import Path

import pytest
from helpers.experiments import option, write_experiment
from helpers.fast import policy_of
from helpers.loading import load_tool
from helpers.paths import ROOT
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning.plugins.console.sweep.experiment import Experiment
from grpo_lightning.plugins.console.sweep.sweep_runs import Children

tool = load_tool("run_experiment")

EXPERIMENT = {
    "config": ["configs/quickstart.yaml"],
    "args": {"trainer.max_epochs": 3, "model.rewards": [{"class_path": "MathVerifier"}]},
    "seeds": [0, 7],
    "arms": {
        "no KL": None,
        "beta 0.04": {"model.objective.beta": 0.04},
        "Dapo!": {"config": "configs/dapo.yaml", "trainer.max_epochs": 5, "loop.shuffle": True},
    },
    "metrics": ["val/x"],
}


def write(folder: Path, **changes: object) -> Path:
    """An experiment's folder; a key that is None is left out."""
    return write_experiment(folder, EXPERIMENT | changes)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository's root with an experiment, whose runs are made by `fake_fit`."""
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Children, "call", fake_fit)
    (tmp_path / "configs").mkdir()
    write(tmp_path / "experiments" / "e")
    (tmp_path / "experiments" / "e" / "README.md").write_text(f"# E\n{tool.OPEN}\n{tool.CLOSE}\nEnd.\n")
    return tmp_path


def fake_fit(children: Children, arguments: list[str], log: Path) -> int:
    """Says something and logs max_epochs + seed as val/x; seed 7 of the arm with beta makes a mistake."""
    beta = any(one.startswith("--model.objective.beta=") for one in arguments)
    seed = int(option(arguments, "seed_everything"))
    if beta and seed == 7 and arguments[-1] != "--print_config":
        log.write_text("working\ngrpo: error: beta=0.04: too much\n")
        return 2
    log.write_text("working\n")
    if arguments[-1] == "--print_config":
        return 0
    with SummaryWriter(option(arguments, "trainer.default_root_dir")) as writer:
        writer.add_scalar("epoch", 0, 0)
        writer.add_scalar("val/x", int(option(arguments, "trainer.max_epochs")) + seed, 0)
    return 0


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiments/*/experiment.yaml")), ids=lambda path: path.parent.name)
def test_experiments_of_the_repository_can_take_their_tables(path: Path):
    tool.check(Experiment.read(path.parent), path.parent, write=True)


def test_runs_are_made_compared_and_kept(root: Path, capfd: pytest.CaptureFixture[str]):
    folder = write(root / "experiments" / "e", arms={"base": {}, "longer": {"trainer.max_epochs": 5}})
    tool.main([str(folder), "--write"])
    out = capfd.readouterr().out
    assert "4 runs, 4 to make" in out and "longer, seed 7: 0 s" in out and "working" not in out
    assert (root / "runs/experiments/e/base/0/log.txt").read_text() == "working\n"
    assert set(json.loads((root / "runs/experiments/e/base/0/done.json").read_text())) == {"arguments", "seconds"}
    # 3 and 10: mean 6.5, half 12.7 * 7 / 2 = 44.5. 5 and 12: 2 more with either seed.
    readme = (folder / "README.md").read_text()
    assert "| base | 2 | 6 ± 44 | – |" in readme and "| longer | 2 | 8 ± 44 | +2 |" in readme
    assert readme.startswith(f"# E\n{tool.OPEN}\n| arm |") and readme.endswith(f"\n{tool.CLOSE}\nEnd.\n")
    assert (folder / "results.png").read_bytes() == (root / "runs/experiments/e/results.png").read_bytes()

    marks = {path: path.stat().st_mtime_ns for path in root.glob("runs/experiments/e/*/*/done.json")}
    (root / "runs/experiments/e/base/7/done.json").unlink()  # as if interrupted
    (root / "runs/experiments/e/base/7/left_over").touch()
    tool.main([str(folder), "--write"])
    out = capfd.readouterr().out
    assert "4 runs, 1 to make" in out and "1/1 base, seed 7" in out
    assert not (root / "runs/experiments/e/base/7/left_over").exists()
    again = {path for path, time in marks.items() if path.stat().st_mtime_ns != time}
    assert again == {root / "runs/experiments/e/base/7/done.json"}
    assert (folder / "README.md").read_text() == readme

    write(folder, arms={"base": {}, "longer": {"trainer.max_epochs": 6}})  # other options: run anew
    tool.main([str(folder)])
    assert "4 runs, 2 to make" in capfd.readouterr().out
    tool.main([str(folder), "--again"])
    assert "4 runs, 4 to make" in capfd.readouterr().out


def test_a_run_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a class of the experiment's, by FILE.CLASS from the root, as `grpo` finds them."""
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    policy_of().save_pretrained(tmp_path / "policy")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "own.py").write_text("from helpers.fitting import Digits\nclass Own(Digits): ...\n")
    args = {
        **{"trainer.accelerator": "cpu", "trainer.max_epochs": 1, "trainer.limit_val_batches": 0},
        **{"model.policy.path": "policy", "model.rewards": [{"class_path": "e.own.Own"}]},
        **{"model.sampling.max_new_tokens": 4, "data.task": "helpers.fitting.Echo"},
        **{"loop.group_size": 2, "loop.prompts_per_step": 2},
    }
    changes = {"config": None, "args": args, "arms": {"one": {}}, "seeds": [0], "x": "seconds"}
    folder = write(tmp_path / "e", metrics=["reward/mean"], **changes)
    tool.main([str(folder), "--workers", "1"])
    log = (tmp_path / "runs/experiments/e/one/0/log.txt").read_text()
    assert "step 1/1: reward " in log and "1 of 1 steps in " in log
    assert "| one | 1 |" in (tmp_path / "runs/experiments/e/results.md").read_text()


def test_a_run_that_fails_says_why_and_the_others_count(root: Path, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"1 of 6 runs failed: beta 0\.04, seed 7"):
        tool.main(["experiments/e", "--write"])
    out = capfd.readouterr().out
    reason = "grpo: error: beta=0.04: too much (exit status 2). See runs/experiments/e/beta_0.04/7/log.txt"
    assert f"beta 0.04, seed 7: failed: {reason}" in out
    assert "| beta 0.04 | 1 |" in out and "| no KL | 2 |" in out
    assert not (root / "runs/experiments/e/beta_0.04/7/done.json").exists()
    assert not (root / "experiments/e/results.png").exists()  # --write is for what is whole
