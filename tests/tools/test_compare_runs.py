from pathlib import Path

import pytest
from helpers.curves import arm, scalars, write
from helpers.loading import load_tool
from PIL import Image

tool = load_tool("compare_runs")
Metric = tool.Metric


def test_from_event_files_to_table_and_picture(tmp_path: Path):
    """Two arms with two seeds; the second arm makes two updates a step."""
    for seed, end in enumerate((0.5, 0.7)):
        write(tmp_path / "plain" / str(seed), scalars([0.25, end]))
        write(tmp_path / "more" / str(seed), scalars([0.5, end + 0.25], updates_per_step=2, seconds=2.0))
    folders = {arm: [tmp_path / arm / seed for seed in "01"] for arm in ("plain", "more")}
    out = tmp_path / "new" / "results"
    metrics = [Metric.parse(text) for text in ("val/x", "val/x>=0.75")]
    text = tool.write(folders, metrics, ["step", "seconds"], out)
    assert text == out.with_suffix(".md").read_text(encoding="utf-8")
    step, seconds = (line for line in text.splitlines() if line.startswith("| more"))
    assert step == "| more | 2 | 0.8 ± 1.3 | +0.25 | 2 | – |"
    # At 2 seconds, when plain has ended: 0.5 in both seeds, less 0.5 and 0.7.
    assert seconds == "| more | 2 | 0.5 | -0.1 ± 1.3 | 4 | – |"
    assert "| plain | 2 | 0.6 ± 1.3 | – | ≥ 2 (0 of 2) | – |" in text and "only k of n runs reached" in text
    with Image.open(out.with_suffix(".png")) as picture:
        assert picture.size == (600, 690)
    with pytest.raises(ValueError, match="no run has logged val/nothing; logged are optim/updates"):
        tool.write(folders, [Metric("val/nothing")], ["step"], out)
    with pytest.raises(ValueError, match="arm 'none' has no run"):
        tool.write({"none": []}, metrics, ["step"], out)


def test_more_than_three_metrics_take_a_second_table():
    metrics = [Metric("val/x"), Metric("val/x", "mean"), *(Metric("val/x", ">=", at) for at in (0.1, 0.2))]
    lines = tool.markdown(tool.compare({"a": arm(scalars([0.5, 1.0]))}, metrics)).splitlines()
    assert [line for line in lines if line.startswith("| a ")] == ["| a | 1 | 1 | 0.75 | 1 |", "| a | 1 | 1 |"]
    assert lines[4] == "| arm | seeds | exploration steps to val/x ≥ 0.2 |"
