import json
from pathlib import Path

import pytest
import yaml
from helpers.command import parser_of_options
from helpers.fast import policy_of
from helpers.loading import load_tool
from helpers.paths import ROOT
from torch.utils.tensorboard import SummaryWriter

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
    folder.mkdir(parents=True, exist_ok=True)
    experiment = {key: value for key, value in (EXPERIMENT | changes).items() if value is not None}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository's root with an experiment, whose runs are made by `fake_fit`."""
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "grpo", fake_fit)
    (tmp_path / "configs").mkdir()
    write(tmp_path / "experiments" / "e")
    (tmp_path / "experiments" / "e" / "README.md").write_text(f"# E\n{tool.OPEN}\n{tool.CLOSE}\nEnd.\n")
    return tmp_path


def option(arguments: list[str], name: str) -> str:
    [value] = [one.split("=", 1)[1] for one in arguments if one.startswith(f"--{name}=")]
    return value


def fake_fit(arguments: list[str], log: Path) -> int:
    """Says something and logs max_epochs + seed as val/x; seed 7 of the arm with beta makes a mistake."""
    beta = any(one.startswith("--model.objective.beta=") for one in arguments)
    seed = int(option(arguments, "seed_everything"))
    if beta and seed == 7:
        log.write_text("working\ngrpo: error: beta=0.04: too much\n")
        return 2
    log.write_text("working\n")
    with SummaryWriter(option(arguments, "trainer.default_root_dir")) as writer:
        writer.add_scalar("epoch", 0, 0)
        writer.add_scalar("val/x", int(option(arguments, "trainer.max_epochs")) + seed, 0)
    return 0


def test_a_grid_crosses_every_arm(tmp_path: Path):
    grid = {"model.optimizer.lr": [1e-4, 3e-4], "loop.stop": ["FixedPasses", "KLAbove"]}
    crossed = tool.Experiment.read(write(tmp_path / "crossed", arms={"mu 1": {"loop.mu": 1}, "mu 2": {}}, grid=grid))
    assert [*crossed.arms][:5] == [
        *(f"mu 1, lr {lr}, stop {stop}" for lr in ("0.0001", "0.0003") for stop in ("FixedPasses", "KLAbove")),
        "mu 2, lr 0.0001, stop FixedPasses",
    ]
    run = crossed.run("mu 1, lr 0.0003, stop KLAbove", 7, Path("runs"))
    assert run.arguments[-5:-2] == ["--loop.mu=1", "--model.optimizer.lr=0.0003", "--loop.stop=KLAbove"]
    assert run.folder == Path("runs/mu_1_lr_0.0003_stop_klabove/7")
    alone = tool.Experiment.read(write(tmp_path / "alone", arms=None, grid={"loop.mu": [1, 4]}))
    assert alone.arms == {"mu 1": {"loop.mu": 1}, "mu 4": {"loop.mu": 4}}


def test_an_arms_file_and_options_override_those_of_every_run(tmp_path: Path):
    runs = tool.Experiment.read(write(tmp_path / "e")).runs(Path("runs/experiments/e"))
    assert [(run.arm, run.seed) for run in runs] == [(arm, seed) for seed in (0, 7) for arm in EXPERIMENT["arms"]]
    first, *others, folder = runs[2].arguments
    assert [first, *others[:2]] == ["fit", "--config=configs/quickstart.yaml", "--config=configs/dapo.yaml"]
    assert others[-4:] == [
        '--model.rewards=[{"class_path": "MathVerifier"}]',
        *("--trainer.max_epochs=5", "--loop.shuffle=true", "--seed_everything=0"),
    ]
    assert folder == "--trainer.default_root_dir=runs/experiments/e/dapo/0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"a b": {}, "A-B": {}}}, "letters and digits differ"),
        ({"arms": {}}, "the arms need names"),
        ({"seeds": []}, "one seed or more"),
        ({"grid": {"loop.mu": 2}}, "give a list of values for each option, not 2"),
        ({"arms": None}, "metrics, and arms or a grid"),
        ({"metric": ["val/x"]}, "nothing else"),
        ({"metrics": ["val/x:median"]}, "metric 'val/x:median'"),
        ({"x": "hours"}, "x: hours: give any of step"),
    ],
)
def test_mistakes_show_before_anything_runs(root: Path, changes: dict, message: str):
    with pytest.raises(SystemExit, match=message):
        tool.main([str(write(root / "experiments" / "e", **changes))])
    assert not (root / "runs").exists()


EXPERIMENTS = sorted(ROOT.glob("experiments/*/experiment.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.parent.name)
def test_experiments_of_the_repository_have_known_options(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tool.ROOT)
    experiment = tool.Experiment.read(path.parent)
    tool.check(experiment, path.parent, write=True)
    parser = parser_of_options()
    for run in experiment.runs(Path("runs/experiments/e"))[: len(experiment.arms)]:
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([*run.arguments, "--print_config"])
        assert ended.value.code == 0


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
    assert (
        "beta 0.04, seed 7: failed: grpo: error: beta=0.04: too much (see runs/experiments/e/beta_0.04/7/log.txt)"
        in out
    )
    assert "| beta 0.04 | 1 |" in out and "| no KL | 2 |" in out
    assert not (root / "runs/experiments/e/beta_0.04/7/done.json").exists()
    assert not (root / "experiments/e/results.png").exists()  # --write is for what is whole
