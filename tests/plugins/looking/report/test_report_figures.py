"""`grpo report --out FOLDER`: figures for a paper with their data, through the command line."""

import csv
import importlib.util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from helpers.curves import scalars, write

from grpo_lightning.command.overview import answer
from grpo_lightning.plugins.looking.report import report_figures

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def arms(tmp_path: Path) -> Path:
    """Two arms with three seeds: the last values 0.5, 0.6, 0.7 and 0.6, 0.8, 1.0."""
    for seed in range(3):
        for name, mu, last in (("plain", 1, 0.5 + 0.1 * seed), ("$twice$", 2, 0.6 + 0.2 * seed)):
            run = tmp_path / "experiment" / name / str(seed)
            write(run, scalars([0.1, last], name="val/avg@8"))
            config = {"seed_everything": seed, "loop": {"mu": mu}}
            (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return tmp_path / "experiment"


def make(arms: Path, *options: str, folder: str = "figures") -> Path:
    """The folder that the command fills."""
    out = arms.parent / folder
    assert answer(["report", str(arms), "--base", "plain", "-o", str(out), *options]) == 0
    return out


def test_a_folder_holds_the_page_the_curves_and_the_tables(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = make(arms, "--metrics", "val/avg@8", "--x", "step", "tokens", "--table", "tex")
    stems = ("val_avg_8_over_step", "val_avg_8_over_tokens")
    figures = {f"{stem}.{ending}" for stem in stems for ending in ("svg", "pdf", "csv")}
    assert {file.name for file in out.iterdir()} == figures | {"report.html", "numbers.tex"}
    assert f"{out}: 2 figures as SVG, PDF and CSV\n" in capsys.readouterr().out
    assert (out / "val_avg_8_over_step.pdf").read_bytes().startswith(b"%PDF-")
    assert r"\begin{tabular}" in (out / "numbers.tex").read_text(encoding="utf-8")


def test_a_figure_shows_what_its_data_say(arms: Path) -> None:
    out = make(arms, "--metrics", "val/avg@8", "val/avg@8>=0.5")
    with (out / "val_avg_8_over_step.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    points = {(row["arm"], row["seed"], float(row["x"])): row for row in rows}
    assert len(points) == len(rows) == 2 * (1 + 3) * 2
    assert [row["arm"] for row in rows[:1]] == ["plain"]
    assert float(points["plain", "2", 2.0]["y"]) == pytest.approx(0.7, rel=1e-6)
    mean = points["plain", "mean", 2.0]
    # 0.5, 0.6, 0.7: 0.6 ± 4.3027 * 0.1 / √3.
    half = 4.302653 * 0.1 / 3**0.5
    expected = [0.6, 0.6 - half, 0.6 + half]
    assert [float(mean[name]) for name in ("y", "low", "high")] == pytest.approx(expected, rel=1e-5)
    assert points["plain", "0", 2.0]["low"] == ""
    # The first values are equal, which is no interval.
    assert points["plain", "mean", 1.0]["low"] == points["plain", "mean", 1.0]["high"] == ""

    svg = ElementTree.parse(out / "val_avg_8_over_step.svg").getroot()
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert {"exploration steps", "val/avg@8", "plain", "$twice$", "1", "2"} <= {*texts}


def test_a_single_run_and_a_constant_curve(tmp_path: Path) -> None:
    write(tmp_path / "run", scalars([1.0, 1.0, 1.0], name="val/greedy"))
    assert answer(["report", str(tmp_path / "run"), "--metrics", "val/greedy", "-o", str(tmp_path / "out")]) == 0
    rows = (tmp_path / "out" / "val_greedy_over_step.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == "arm,seed,x,y,low,high" and len(rows) == 1 + 2 * 3
    svg = ElementTree.parse(tmp_path / "out" / "val_greedy_over_step.svg").getroot()
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert sorted(texts) == ["1", "1", "2", "3", "exploration steps", "val/greedy"]


def test_the_same_runs_give_the_same_files(arms: Path) -> None:
    folders = [make(arms, "--metrics", "val/avg@8", folder=name) for name in ("one", "two")]
    for ending in ("svg", "pdf", "csv"):
        first, second = (folder / f"val_avg_8_over_step.{ending}" for folder in folders)
        assert first.read_bytes() == second.read_bytes(), ending


def refused(capsys: pytest.CaptureFixture[str], out: Path) -> str:
    """The message of a command whose runs do not exist: the folder is checked before anything is read."""
    assert answer(["report", "nowhere", "-o", str(out)]) == 2
    return capsys.readouterr().err


def test_a_folder_that_takes_no_files_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    message = f"--out {tmp_path / 'file'}: nothing can be written to {tmp_path / 'file'}. Give another folder"
    assert message in refused(capsys, tmp_path / "file")
    assert "nothing can be written to" in refused(capsys, tmp_path / "file" / "figures")
    assert "nowhere: there is no such folder" in refused(capsys, tmp_path / "new" / "figures")
    assert not (tmp_path / "new").exists()


def test_without_matplotlib_one_sentence_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> Any:
        return None if name == "matplotlib" else importlib.util.find_spec(name)

    monkeypatch.setattr(report_figures, "find_spec", find)
    message = refused(capsys, tmp_path / "figures")
    assert "figures need matplotlib. Install it with pip install 'grpo-lightning[figures]'" in message
    assert "figures.html" in message and not (tmp_path / "figures").exists()
