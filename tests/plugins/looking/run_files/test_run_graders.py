"""One grader for runs with different rewards, through the command line."""

import json
import re
from pathlib import Path

import pytest
import yaml
from helpers.command import OPTIONS, Grpo
from helpers.fitting import scalars
from helpers.inspecting import completions_of, groups_of

from grpo_lightning.plugins.looking.inspector.record import read
from grpo_lightning.plugins.looking.report import report_command

FUNCTION = '''
def brief(sample):
    """Right answers, and the sooner the better."""
    return float(sample.text.strip() == sample.answer) - 0.01 * len(sample.token_ids)
'''
BRIEF = "{class_path: FunctionReward, init_args: {function: my_rewards.brief}}"
REWARDS = {
    "brief": f"[{BRIEF}]",
    "form": "[FormatReward]",
}
# The only token of an answer is a digit now and then, and then now and then the right one.
SUMS = [
    *(f"--{key}!" for key in OPTIONS if key.startswith("data.task")),
    "--data.task=Arithmetic",
    "--data.task.max_digits=1",
    "--data.task.num_train=20",
    "--data.task.num_val=40",
    "--data.answer_prefix=The answer is ",
    "--model.sampling.max_new_tokens=1",
    "--model.validation.samples=8",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    path = tmp_path_factory.mktemp("graders")
    (path / "my_rewards.py").write_text(FUNCTION)
    (path / "policy").symlink_to(policy_folder)
    return path


@pytest.fixture
def grpo(folder: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch) -> Grpo:
    monkeypatch.chdir(folder)
    return command


@pytest.fixture
def arms(folder: Path, grpo: Grpo) -> None:
    """A run per list of rewards, in a folder of its name, made once."""
    for name, rewards in REWARDS.items():
        if not (folder / name).exists():
            options = (f"--model.rewards={rewards}", f"--trainer.default_root_dir={name}", "--model.optimizer.lr=1e-2")
            grpo.ok("fit", *SUMS, *options)


@pytest.mark.usefixtures("arms")
def test_two_rewards_are_graded_by_one(folder: Path, grpo: Grpo) -> None:
    for name in REWARDS:
        options = ("--model.rewards=[MathVerifier]", f"--ckpt_path={name}/checkpoints/last.ckpt")
        grpo.ok("validate", *SUMS, *options, f"--trainer.default_root_dir=by_{name}")
        in_run, alone = scalars(folder / name), scalars(folder / f"by_{name}")
        for metric in ("val/avg@8", "val/greedy", "val/pass@8", "val/maj@8", "val/failed"):
            assert in_run[metric][0] == alone[metric][0], (name, metric)
        assert 0 < in_run["val/avg@8"][0] < in_run["val/pass@8"][0] < 1
        # All begin alike, whatever their total is.
        assert in_run["val/avg@8"][-1] == scalars(folder / "form")["val/avg@8"][-1]
    assert len({scalars(folder / name)["val/reward"][-1] for name in REWARDS}) == 2


@pytest.mark.usefixtures("arms")
def test_the_saved_run_names_the_grader(folder: Path) -> None:
    for name in REWARDS:
        config = yaml.safe_load((folder / name / "config.yaml").read_text())
        assert config["model"]["validation"]["grader"]["class_path"] == "grpo_lightning.MathVerifier"
    (record, *_) = read(folder / "form")
    validation = completions_of(record, "validation")
    assert {one.grader for one in validation} == {"math_verifier"} and "math_verifier" in validation[0].scores
    for name in REWARDS:
        for group in groups_of(read(folder / name)[-1]):
            for one in group.completions:
                assert one.grader == "math_verifier" and one.scores.keys() >= {"math_verifier"}
                assert one.right == (one.text.strip() == group.gold) == (one.scores["math_verifier"] == 1)
    table = [json.loads(line) for line in (folder / "brief" / "completions.jsonl").read_text().splitlines()]
    assert {row["scores"]["math_verifier"] for row in table} <= {0.0, 1.0}
    assert all(row["scores"].keys() == {"brief", "math_verifier"} for row in table)


@pytest.mark.usefixtures("arms")
def test_the_report_names_the_grader_of_all_or_of_each(
    folder: Path, grpo: Grpo, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert report_command.main([*REWARDS, "-o", "alike.html"]) == 0
    assert "graded differently" not in capsys.readouterr().out
    half = max(list(scalars(folder / name)["val/ci95"].values())[-1] for name in REWARDS)
    found = f"answers: fraction right by MathVerifier; ± {half:.3f} over 40 questions at a run&#39;s end (95 %)"
    assert half > 0 and found in (folder / "alike.html").read_text()
    other = ("--model.rewards=[FormatReward]", f"--model.validation.grader={BRIEF}", "--trainer.default_root_dir=other")
    grpo.ok("fit", *SUMS, *other)
    assert re.search(r"^validation  avg@8 .*: mean of my_rewards.brief$", caplog.text, re.MULTILINE)
    assert report_command.main(["form", "other", "-o", "mixed.html"]) == 0
    note = r"validation was graded differently, so val/ does not compare: .* by MathVerifier; .* by my_rewards\.brief"
    assert re.search(note, capsys.readouterr().out) and re.search(note, (folder / "mixed.html").read_text())
    assert "fraction right" not in (folder / "mixed.html").read_text()


def test_without_gold_answers_predictions_are_not_scored(
    folder: Path, grpo: Grpo, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "rows.jsonl").write_text('{"question": "1"}\n{"question": "2"}\n')
    code, _, errors = grpo("predict", "--model.rewards=[MathVerifier]", "--data.task.predict=rows.jsonl")
    assert code == 0 and "failed" not in caplog.text, errors
    assert "reward math_verifier did not score 4 of 4 samples: they have no gold answer" in caplog.text
    rows = [yaml.safe_load(line) for line in (folder / "run" / "predictions.jsonl").read_text().splitlines()]
    assert [(row["question"], row["sample"]) for row in rows] == [("1", 0), ("1", 1), ("2", 0), ("2", 1)]
    assert {row["statuses"]["math_verifier"] for row in rows} == {"no_gold"}
