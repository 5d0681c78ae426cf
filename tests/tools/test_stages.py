"""The lines that `make demo` and `make real` end with; the demo's stages run in tests/test_commands.py."""

from pathlib import Path

import pytest
from helpers.loading import load_tool
from torch.utils.tensorboard import SummaryWriter

tool = load_tool("stages")
RUN = "runs/one"


@pytest.mark.parametrize("has_page", [False, True])
def test_the_last_line_has_the_change_and_names_the_page(
    has_page: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    with SummaryWriter(str(tmp_path / RUN)) as writer:
        for update, value in ((-1, 0.39), (9, 0.7), (19, 0.96)):
            writer.add_scalar("val/avg@8", value, update)
            writer.add_scalar("val/greedy", value + 0.03, update)
    (tmp_path / RUN / "config.yaml").write_text(
        "{model: {rewards: [{class_path: grpo_lightning.FunctionReward, init_args: {function: my_rewards.brief}}]}}"
    )
    if has_page:
        (tmp_path / tool.page_of(RUN)).touch()
    page = "every token in runs/one/inspect.html, " if has_page else ""
    assert tool.summary(RUN, 105.6) == (
        f"avg@8 0.39 -> 0.96, greedy 0.42 -> 0.99 (mean of my_rewards.brief) in 106 s; see {page}the curves with "
        "tensorboard --logdir runs"
    )


def test_a_run_without_its_beginning_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    with SummaryWriter(str(tmp_path / RUN)) as writer:
        for update in (0, 9):
            writer.add_scalar("val/avg@8", 0.5, update)
            writer.add_scalar("val/greedy", 0.5, update)
    with pytest.raises(AssertionError, match="not before training"):
        tool.summary(RUN, 1.0)


def test_a_stage_that_fails_ends_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"failed with exit code 3: python -c raise SystemExit\(3\)"):
        tool.run_stages(
            [("Nothing", ["-c", "pass"]), ("Failing", ["-c", "raise SystemExit(3)"]), ("Never", ["-c", "1"])]
        )
    printed = capfd.readouterr().out
    assert "2/3 Failing" in printed and "Never" not in printed
