"""`grpo inspect` as a user calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.inspecting import group_of, plain_tokens, step_of, write_records
from helpers.paths import environment

from grpo_lightning.inspect.command import main
from grpo_lightning.inspect.page import CURVES, NUM_POINTS, SCRIPTS, RunData, curves_of
from grpo_lightning.inspect.record import path_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with three recorded steps."""
    return write_records(
        tmp_path / "run", [step_of([group_of([plain_tokens(["a", "b"])])], step=step) for step in (1, 2, 3)]
    )


def blocks(page: Path) -> dict[str, object]:
    """The data in a page, by the id of its element."""
    found = {}
    for part in page.read_text(encoding="utf-8").split('<script type="application/json" id="')[1:]:
        name, _, rest = part.partition('">')
        found[name] = json.loads(rest.partition("</script>")[0])
    return found


def test_the_page_is_in_the_runs_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'inspect.html'}: 0.1 MB; open it in a browser\n"
    data = blocks(run / "inspect.html")
    assert list(data) == ["page", "step-0-1", "step-0-2", "step-0-3"]
    assert data["step-0-2"] == [json.loads(line) for line in path_of(run, 2).read_text().splitlines()]
    assert str(run) not in (run / "inspect.html").read_text(encoding="utf-8")


def test_the_page_is_where_one_asks_for_it(run: Path, tmp_path: Path) -> None:
    assert main([str(run), "-o", str(tmp_path / "page.html"), "--compare", str(run)]) == 0
    assert [name for name in blocks(tmp_path / "page.html") if name.startswith("step-1-")] == [
        f"step-1-{step}" for step in (1, 2, 3)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_small_limit_thins_the_steps_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = group_of([plain_tokens(["token"] * 400)])
    run = write_records(tmp_path / "run", [step_of([group], step=step) for step in range(1, 12)])
    size = path_of(run, 5).stat().st_size
    assert main([str(run), "--max_mb", str(3.3 * size / 1e6)]) == 0
    assert "3 of the 11 recorded steps of run are here, evenly spread" in capsys.readouterr().out
    assert [name for name in blocks(run / "inspect.html") if name != "page"] == ["step-0-1", "step-0-6", "step-0-11"]
    assert main([str(run), "--max_mb", "0"]) == 0
    assert [name for name in blocks(run / "inspect.html") if name != "page"] == ["step-0-11"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["empty"], "empty: no records in empty/inspect; give the folder of a run with `inspect` on"),
        (["."], "no records here, but in folders below it; give one, such as run"),
        (["run/inspect"], "this is where a run keeps its records; give the run's folder"),
        (["run", "--compare", "empty"], "empty: no records"),
        (["run", "-o", "nowhere/page.html"], "nowhere/page.html: cannot be written"),
        (["run", "--max_mb", "-1"], "max_mb=-1.0: give 0 or more"),
    ],
)
def test_mistakes_get_one_message(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("grpo: error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("breakage", ["cut", "bytes", "other format", "ragged", "not a step"])
def test_a_broken_file_is_told(run: Path, capsys: pytest.CaptureFixture[str], breakage: str) -> None:
    path = path_of(run, 2)
    text = path.read_text()
    group = json.loads(text.splitlines()[1])
    group["completions"][0]["tokens"]["pieces"].append("c")
    ragged = "\n".join([text.splitlines()[0], json.dumps(group)])
    broken = {
        "cut": text[:-200],
        "bytes": "\udcff",
        "other format": text.replace('"format": 1', '"format": 9'),
        "ragged": ragged,
        "not a step": "[]",
    }
    path.write_bytes(broken[breakage].encode(errors="surrogateescape"))
    assert main([str(run)]) == 0
    assert "step-000002.jsonl cannot be read and is left out" in capsys.readouterr().out
    assert [name for name in blocks(run / "inspect.html") if name != "page"] == ["step-0-1", "step-0-3"]


def test_it_starts_without_torch() -> None:
    program = (
        "import sys; from grpo_lightning.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as stopped: code = stopped.code\n"
        "assert not code and not {'torch', 'lightning', 'tensorboard'} & {*sys.modules}, code"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", "--help"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: grpo inspect [-h] [-o FILE] [--compare RUN2] [--max_mb MB] RUN" in done.stdout
    assert len(done.stdout.splitlines()) < 20


def test_a_page_is_written_without_torch(run: Path) -> None:
    program = (
        "import sys; from grpo_lightning.inspect.command import main\n"
        "assert main(sys.argv[1:]) == 0 and not {'torch', 'lightning'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program, str(run)], env=environment(), check=True)


def test_every_script_is_in_the_page() -> None:
    assets = Path(__file__).parents[2] / "grpo_lightning" / "inspect" / "assets"
    assert sorted(SCRIPTS) == sorted(path.stem for path in assets.glob("*.js"))


def test_curves_are_those_that_the_run_has() -> None:
    points = [(update, float(update)) for update in range(1000)]
    scalars = {
        "reward/mean": points,
        "policy/clip_low": [(0, 0.25), (1, float("nan"))],
        "policy/clip_high": [(0, 0.5)],
        "val/avg@4": [(0, 1.0)],
    }
    curves = curves_of(scalars)
    assert list(curves) == ["reward", "validation", "clipped"]
    assert curves["clipped"] == [(0, 0.75)]
    assert len(curves["reward"]) == NUM_POINTS and curves["reward"][0] == (0, 0) and curves["reward"][-1] == (999, 999)
    assert curves_of({}) == curves_of({"policy/kl_old": [(0, 0.0), (1, 0.0)]}) == {}
    assert curves_of({"policy/kl_old": [(0, 1.0)]}) == {"KL": [(0, 1.0)]} and "policy/kl_ref" in CURVES["KL"]


def test_a_run_without_curves_has_a_page(run: Path) -> None:
    assert RunData.read(run).curves == {}
