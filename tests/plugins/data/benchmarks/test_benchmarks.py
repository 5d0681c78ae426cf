"""Validations of names of their own, in a run and without one."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.command import LETTERS, Grpo
from helpers.fitting import scalars

from grpo_lightning.cli import run
from grpo_lightning.command.overview import answer

SAME = "{class_path: JsonPrompts, init_args: {test: rows.jsonl}}"


def layer(folder: Path, text: str) -> str:
    """The path of a configuration with these validations."""
    (folder / "layer.yaml").write_text(f"data: {{validations: {text}}}\n")
    return "layer.yaml"


def test_a_benchmark_measures_as_validation_does(tmp_path: Path, grpo: Grpo, caplog: pytest.LogCaptureFixture) -> None:
    """The same questions, grader and sampling give the same numbers under another name."""
    grader = "{class_path: FormatReward, init_args: {pattern: '.*[a-m]+.*'}}"
    config = layer(tmp_path, f"{{same: {{task: {SAME}, grader: {grader}, samples: 2}}}}")
    watched = "--checkpoint.monitor=val/same/avg@2"
    code, _, err = grpo("fit", f"--config={config}", LETTERS, "--trainer.max_epochs=2", watched)
    assert code == 0, err
    found = scalars(tmp_path / "run")
    assert len(found["val/avg@2"]) == 3
    for name in ("avg@2", "greedy", "pass@2", "ci95", "length"):
        assert found[f"val/same/{name}"] == pytest.approx(found[f"val/{name}"], nan_ok=True), name
    assert "same/avg@2" in caplog.text


def test_a_benchmark_is_asked_when_it_is_due(tmp_path: Path, grpo: Grpo) -> None:
    """Before the first step, and after those whose number is a multiple of `every`; the main validation may be off."""
    rare = f"{{rare: {{task: {SAME}, grader: FormatReward, samples: 1, every: 2, limit: 3}}}}"
    code, _, err = grpo("fit", f"--config={layer(tmp_path, rare)}", "--trainer.max_epochs=3", "--data.val_limit=0")
    assert code == 0, err
    found = scalars(tmp_path / "run")
    assert [*found["val/rare/avg@1"]] == [-1, 1]
    assert not [name for name in found if name.startswith("val/") and not name.startswith("val/rare/")]


@pytest.mark.usefixtures("grpo")
def test_a_model_is_evaluated_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = layer(tmp_path, f"{{one: {{task: {SAME}, grader: FormatReward}}, two: {{task: Arithmetic}}}}")
    sizes = ["--samples=2", "--limit=4", "--model.sampling.max_new_tokens=4", "-o", "found.json"]
    assert answer(["evaluate", "policy", "--benchmarks", config, *sizes]) is None
    assert sys.argv.index("--model.engine.packed") < sys.argv.index("--config")  # so that a configuration wins
    run()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["model"] == "policy" and {"one", "two"} < found.keys()
    assert found["provenance"].keys() >= {"grpo_lightning", "commit", "torch", "command", "seed", "precision"}
    digests = {name: f"{found[name]['questions']} (4 questions)" for name in ("one", "two")}
    assert found["provenance"]["data"] == digests
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " ± " in line]
    for name, line in zip(("one", "two"), lines, strict=True):
        numbers = found[name]
        half = numbers["half_width"]["avg@2"]
        assert line[:6] == [name, "4", "2", f"{numbers['avg@2']:.3f}", "±", f"{half:.3f}"]
        assert numbers["num_questions"] == 4 and len(numbers["questions"]) == 16 and numbers["ci95"] == half
        # None of four questions is right: Wilson's interval from 0 to t² / (n + t²), and not ± 0.
        assert numbers["greedy"] == 0 and numbers["half_width"]["greedy"] == pytest.approx(0.7169, abs=1e-4)
    assert not (tmp_path / "run").exists()


def test_validate_and_test_print_intervals_and_the_number_of_questions(grpo: Grpo, tmp_path: Path) -> None:
    extra = layer(tmp_path, f"{{same: {{task: {SAME}, grader: FormatReward, samples: 2}}}}")
    for command, name in (("validate", "val"), ("test", "test")):
        out = grpo.ok(command, LETTERS)
        rows = dict(re.split(r" {2,}", line, maxsplit=1) for line in out.splitlines())  # type: ignore[misc]
        assert rows["validation"] == name and rows["questions"] == "8" and rows["k"] == "2"
        assert all(re.fullmatch(r"\d\.\d{3} ± 0\.\d{3}", rows[title]) for title in ("avg@k", "pass@k", "greedy"))
        assert rows["grader"] == "mean of FormatReward" and "nan" not in out
        table = scalars(Path("run"))
        assert rows["avg@k"].startswith(f"{[*table[f'{name}/avg@2'].values()][-1]:.3f} ")
    lines = [line.split() for line in grpo.ok("validate", LETTERS, f"--config={extra}").splitlines()]
    assert [line[:3] for line in lines[1:]] == [["val", "8", "2"], ["same", "8", "2"]]
    assert " ± " not in grpo.ok("validate", LETTERS, "--verbose=false")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{{a b: {{task: {SAME}, grader: FormatReward}}}}", "data.validations.a b: give a name of letters"),
        (f"{{one: {{task: {SAME}}}}}", "set data.validations.one.grader: JsonPrompts names none"),
        (f"{{one: {{task: {SAME}, grader: FormatReward, samples: 0}}}}", "data.validations.one.samples=0: give 1"),
        ("{one: {task: JsonPrompts, grader: FormatReward}}", "data.validations.one: data.task.test is not set"),
    ],
)
def test_a_mistake_names_the_benchmark(tmp_path: Path, grpo: Grpo, text: str, message: str) -> None:
    code, _, err = grpo("fit", f"--config={layer(tmp_path, text)}")
    assert code == 2 and message in err, err


def test_a_benchmark_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["evaluate", "policy", "--benchmarks", "gsm9k"]) == 2
    err = capsys.readouterr().err
    assert "--benchmarks gsm9k: no such file" in err and "gsm8k, math500" in err
