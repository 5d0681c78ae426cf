from pathlib import Path

import pytest
from helpers.loading import load_tool
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

tool = load_tool("plot_run")


def write(folder: Path, suffix: str, values: dict[str, dict[int, float]], time: float) -> None:
    """One event file, all of it written at `time`."""
    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for name, points in values.items():
            for step, value in points.items():
                writer.add_scalar(name, value, step, walltime=time)


def test_the_last_value_at_a_step_wins(tmp_path: Path):
    # The first run got to step 2 and was resumed at step 1; the name of its file sorts last.
    write(tmp_path, ".z", {"reward/mean": {0: 0.0, 1: 0.25, 2: 0.5}, "val/avg@4": {2: 0.5}}, time=1000.0)
    write(tmp_path, ".a", {"reward/mean": {1: 0.75, 2: 1.0, 3: 2.0}}, time=2000.0)
    renamed = sorted(tmp_path.iterdir(), key=lambda path: path.name.endswith(".z"))
    for number, path in enumerate(renamed):
        path.rename(tmp_path / f"events.out.tfevents.{number}")
    assert tool.read_scalars(tmp_path) == {
        "reward/mean": [(0, 0.0), (1, 0.75), (2, 1.0), (3, 2.0)],
        "val/avg@4": [(2, 0.5)],
    }


def test_picture(tmp_path: Path):
    points = {0: 0.25, 5: 0.5}
    names = ("reward/mean", "val/avg@4", "val/greedy", "val/maj@4")
    write(tmp_path / "run", "", dict.fromkeys(names, points), time=1.0)
    tool.main([str(tmp_path / "run"), "--out", str(tmp_path / "new" / "run.png")])
    with Image.open(tmp_path / "new" / "run.png") as picture:
        assert picture.size == (900, 350)
    assert tool.validation_names(tool.read_scalars(tmp_path / "run")) == ["val/avg@4", "val/greedy", "val/maj@4"]


def test_other_metrics(tmp_path: Path):
    write(tmp_path, "", {name: {0: 1.0, 1: 2.0} for name in ("a/x", "a/y", "a/z")}, time=1.0)
    tool.main([str(tmp_path), "--metrics", "a/x", "a/y", "a/z", "--out", str(tmp_path / "run.png")])
    with Image.open(tmp_path / "run.png") as picture:
        assert picture.size == (1350, 350)
    with pytest.raises(SystemExit, match="no a/w is logged there; logged are a/x, a/y, a/z"):
        tool.main([str(tmp_path), "--metrics", "a/w", "--out", str(tmp_path / "run.png")])


def test_folder_without_a_run(tmp_path: Path):
    with pytest.raises(SystemExit, match="no reward/mean is logged there; give a folder"):
        tool.main([str(tmp_path), "--out", str(tmp_path / "run.png")])
