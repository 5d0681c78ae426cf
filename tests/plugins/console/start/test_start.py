"""What a user has without the repository: a project that runs, configurations by name, versions for a bug report."""

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from helpers.fitting import scalars
from helpers.paths import ROOT, environment

from grpo_lightning import cli
from grpo_lightning.command.overview import answer
from grpo_lightning.packaged import POLICY, packaged
from grpo_lightning.plugins.console.start.init import EXAMPLES
from grpo_lightning.types import UsageError

TINY = ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false", "--data.val_limit=2"]
TINY += ["--loop.prompts_per_step=4", "--loop.group_size=4"]
SMALL = ["--trainer.max_epochs=6", "--trainer.enable_progress_bar=false", "--loop.prompts_per_step=16"]


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo"])


def test_the_project_runs_as_its_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer(["init", "mine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine: README.md, my_rewards.py, run.yaml, train.jsonl, val.jsonl",
        "To train: cd mine && grpo fit --config run.yaml",
    ]
    monkeypatch.chdir("mine")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    cli.run(["fit", "--config=run.yaml", "--config", "grpo_lightning:algorithms/dr_grpo", *SMALL])
    found = scalars(tmp_path / "mine" / "runs" / "first")
    first, *_, last = found["reward/mean"].values()
    assert first < last  # a third of the answers is right, less 0.01 per token
    before, after = found["val/greedy"].values()
    assert before < 0.5 < after
    assert answer(["inspect", "runs/first"]) == 0 and answer(["export", "runs/first", "--out=model"]) == 0
    assert answer(["init", "nowhere/../../mine"]) == answer(["init", "."]) == 2
    assert not Path("nowhere").exists()
    assert ".: something is there already" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(path.parent.name for path in EXAMPLES.glob("*/README.md")))
def test_an_example_runs_in_a_folder_of_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer(["init", "copy", "--example", name]) == 0
    _, *commands = capsys.readouterr().out.partition("To train: ")[2].split(" && ")
    monkeypatch.chdir("copy")
    monkeypatch.syspath_prepend(tmp_path / "copy")
    for words in map(str.split, commands):
        if answer(words[1:]) is None:
            cli.run([*words[1:], *TINY])
    assert commands[-1].strip() == "grpo fit --config run.yaml"
    assert Path("runs", name if name != "project" else "first", "checkpoints", "last.ckpt").exists()
    assert "examples" not in Path("run.yaml").read_text()


def test_init_lists_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["init", "somewhere", "--example", "calulator"]) == 2
    error = capsys.readouterr().err
    assert "--example calulator: there is none. There are:\n  arithmetic_segments  Process rewards: " in error
    with pytest.raises(SystemExit):
        answer(["init", "--help"])
    assert error.partition("There are:\n")[2] in capsys.readouterr().out
    assert not Path("somewhere").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("quikstart", "Did you mean quickstart?"),
        ("dapo", "Did you mean algorithms/dapo or algorithms/dppo or algorithms/sapo?"),
        ("", "There are algorithms/cispo, "),
    ],
)
def test_a_wrong_name_is_refused_with_the_near_ones(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["fit", f"--config=grpo_lightning:{name}"])
    assert ended.value.code == 2
    message = f"grpo: error: grpo_lightning:{name}: nothing of this name is installed. {hint}"
    assert capsys.readouterr().err.startswith(message)


def test_names_are_paths_and_paths_stay() -> None:
    assert Path(packaged("grpo_lightning:algorithms/dapo")).samefile(ROOT / "configs" / "algorithms" / "dapo.yaml")
    assert packaged("grpo_lightning:quickstart.yaml") == packaged("grpo_lightning:quickstart")
    assert packaged("grpo_lightning:tiny_policy") == str(POLICY)
    assert packaged("runs/quickstart") == "runs/quickstart"
    with pytest.raises(UsageError, match="nothing of this name"):
        packaged("grpo_lightning:../pyproject")


def test_env_prints_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["env"]) == 0
    facts = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["python"].startswith(f"{platform.python_version()}, ")
    assert facts["torch"] == torch.__version__ and facts["lightning"] == version("lightning")
    assert torch.backends.cpu.get_cpu_capability() in facts["cpu"]
    assert ("gpu 0" in facts) == torch.cuda.is_available()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, what sdist and wheel are made of, and `wheel`, the unpacked wheel of the sdist."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("configs", "examples", "grpo_lightning"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")

    def build(kind: str, source: Path) -> Path:
        code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(folder)!r}))"
        command = [sys.executable, "-c", code]
        output = subprocess.run(command, cwd=source, env=environment(), check=True, capture_output=True, text=True)
        return folder / output.stdout.splitlines()[-1]

    sdist = build("sdist", folder / "source")
    shutil.unpack_archive(sdist, folder, filter="data")
    shutil.unpack_archive(build("wheel", folder / sdist.name.removesuffix(".tar.gz")), folder / "wheel", "zip")
    return folder


def test_wheel_and_sdist_hold_all_that_is_no_python(built: Path) -> None:
    files = [path.relative_to(built / "wheel") for path in (built / "wheel").rglob("*") if path.is_file()]
    held = {path.as_posix() for path in files if path.parts[0] == "grpo_lightning"}
    patterns = ("configs/**/*", "examples/*/**/*", "grpo_lightning/**/*")
    package = [path for pattern in patterns for path in (built / "source").glob(pattern) if path.is_file()]
    expected = {path.relative_to(built / "source").as_posix() for path in package}
    assert held == {name if name.startswith("grpo_lightning/") else f"grpo_lightning/{name}" for name in expected}


SHELL = """set -ex
python() { "$PYTHON" "$@"; }
grpo() {
    [[ "$*" != fit* || "$*" = *.help* ]] || set -- "$@" $SMALLER
    python -c 'from grpo_lightning.__main__ import main; main()' "$@"
}
pip() { :; }
python3() { :; }
source() { :; }
tensorboard() { :; }
python -c 'import grpo_lightning; print(grpo_lightning.__file__)'
"""
"""Runs of one step, and nothing that installs packages or serves until it is stopped."""


def test_the_pages_of_start_run_from_the_wheel(built: Path, tmp_path: Path) -> None:
    """All their blocks as one program of bash, in an empty folder; Python blocks are the files that they name."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/start/*.md")))
    program = SHELL
    for language, block in re.findall(r"^```(bash|python)\n(.*?)^```", pages, re.DOTALL | re.MULTILINE):
        if language == "bash":
            program += block
        elif name := re.match(r"# (\w+\.py)\n", block):
            program += f"cat > {name[1]} <<'CODE'\n{block}CODE\n"
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(built / "wheel"), "SMALLER": " ".join(TINY)}
    command = ["bash", "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.startswith(variables["PYTHONPATH"])
    assert len([*tmp_path.rglob("last.ckpt")]) > 5


def test_the_versions_may_be_cut_short() -> None:
    """As by `grpo env | head -1`."""
    command = [sys.executable, "-m", "grpo_lightning", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True) as env:
        assert env.stdout is not None and env.stderr is not None
        env.stdout.close()
        errors = env.stderr.read()
    assert env.returncode == 0 and errors == ""
