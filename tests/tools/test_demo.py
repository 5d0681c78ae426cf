"""The lines that the demonstration ends with; its stages run in tests/test_commands.py."""

from pathlib import Path

import pytest
from helpers.loading import load_tool
from torch.utils.tensorboard import SummaryWriter


@pytest.mark.parametrize("has_page", [False, True])
def test_the_last_line_has_the_change_and_names_the_page(
    has_page: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    tool = load_tool("demo")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    with SummaryWriter(str(tmp_path / tool.RUN)) as writer:
        for update, value in ((-1, 0.39), (9, 0.7), (19, 0.96)):
            writer.add_scalar("val/avg@8", value, update)
            writer.add_scalar("val/pass@1", value + 0.03, update)
    if has_page:
        (tmp_path / tool.PAGE).touch()
    page = "every token in runs/quickstart/inspect.html, " if has_page else ""
    assert tool.summary(105.6) == (
        f"avg@8 0.39 -> 0.96, pass@1 0.42 -> 0.99 in 106 s; see {page}the curves with tensorboard --logdir runs"
    )


def test_a_run_without_its_beginning_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool("demo")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    with SummaryWriter(str(tmp_path / tool.RUN)) as writer:
        for update in (0, 9):
            writer.add_scalar("val/avg@8", 0.5, update)
            writer.add_scalar("val/pass@1", 0.5, update)
    with pytest.raises(AssertionError, match="not before training"):
        tool.summary(1.0)
