import re
import sys
from pathlib import Path

import pytest
import yaml
from helpers.loading import load_tool
from helpers.paths import ROOT
from helpers.tiny import policy_of, tokenizer
from torch.utils.tensorboard import SummaryWriter

tool = load_tool("plot_sick_runs")

SMALL = {
    "args": {
        **{"trainer.accelerator": "cpu", "trainer.max_epochs": 2, "trainer.limit_val_batches": 0},
        **{"model.policy.path": "policy", "model.rewards": [{"class_path": "helpers.fitting.Digits"}]},
        **{"model.sampling.max_new_tokens": 4, "model.optimizer.class_path": "torch.optim.SGD"},
        **{"model.optimizer.init_args.lr": 0.1, "data.task": "helpers.fitting.Echo", "loop.group_size": 2},
        **{"loop.prompts_per_step": 2},
    },
    "seeds": [0, 7],
    "arms": {"well": {}, "too fast": {"model.optimizer.init_args.lr": 100}},
    "metrics": ["reward/mean"],
}


def write(root: Path, experiment: dict) -> Path:
    """The experiment's folder under `root`, with a README that takes the table."""
    folder = root / "experiments" / "sick_runs"
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))
    (folder / "README.md").write_text("# S\n<!-- results -->\n<!-- /results -->\n")
    return folder


def fake_runs(arguments: list[str]) -> None:
    """Logs a line upwards under every name that a picture or the table needs, for every run of the experiment."""
    names = {name for picture in tool.PICTURES for name in picture.panels} | set(tool.TABLE)
    experiment = tool.run_experiment.Experiment.read(Path(arguments[0]))
    for run in experiment.runs(tool.run_experiment.folder_of(experiment)):
        with SummaryWriter(str(run.folder)) as writer:
            for update in range(3):
                writer.add_scalar("epoch", update, update)
                for name in names:
                    writer.add_scalar(name, update + run.seed, update)


def test_every_picture_is_drawn_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool.run_experiment, "ROOT", tmp_path)
    monkeypatch.setattr(tool.run_experiment, "main", fake_runs)
    experiment = yaml.safe_load((ROOT / "experiments/sick_runs/experiment.yaml").read_text(encoding="utf-8"))
    folder = write(tmp_path, experiment | {"seeds": [0, 2]})
    tool.main(["--out", str(tmp_path / "out")])
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {picture.name for picture in tool.PICTURES}
    for picture in tool.PICTURES:
        drawn = (tmp_path / "out" / f"{picture.name}.svg").read_text(encoding="utf-8")
        texts = re.findall(r">([^<>]+)</text>", drawn)
        assert {*picture.panels, *picture.arms} <= set(texts)
        assert len(drawn) < 60_000
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n| ") == 2 + len(experiment["arms"])  # the head and its line
    # The seeds 0 and 2 rise by 2.
    assert f"| healthy | {' | '.join(['1 → 3'] * len(tool.TABLE))} |" in readme


def test_every_arm_is_drawn():
    experiment = tool.run_experiment.Experiment.read(ROOT / "experiments/sick_runs")
    assert {arm for picture in tool.PICTURES for arm in picture.arms} == experiment.arms.keys()


def test_small_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(tool.run_experiment, "ROOT", tmp_path)
    picture = tool.Picture("fast", ("well", "too fast"), ("reward/mean", "optim/grad_norm"))
    monkeypatch.setattr(tool, "PICTURES", (picture,))
    policy_of("llama").model.save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    folder = write(tmp_path, SMALL)
    tool.main(["--workers", "1", "--out", str(tmp_path / "out")])
    first = (tmp_path / "out" / "fast.svg").read_bytes()
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\| too fast \| \S+ → \S+ \| .* \| – \|", readme)  # this run has no reference and no KL
    assert "the mean over 2 seeds" in readme
    tool.main(["--workers", "1", "--out", str(tmp_path / "out")])
    assert "4 runs, 0 to make" in capfd.readouterr().out
    assert (tmp_path / "out" / "fast.svg").read_bytes() == first


def test_the_reward_pays_for_any_equals_sign(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "experiments/sick_runs")
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    from types import SimpleNamespace

    from rewards import shows_work

    assert shows_work(SimpleNamespace(text="1+1=2=+=")) == pytest.approx(0.6)
