"""tools/screenshots.py: which group and token it shows, and the pictures."""

from pathlib import Path

import numpy as np
import pytest
from helpers.chromium import needs_chromium
from helpers.inspecting import group_of, plain_tokens, step_of
from helpers.loading import load_tool
from helpers.word_run import word_run

tool = load_tool("screenshots")


def test_it_shows_where_rewards_differ_most_and_the_token_that_moved_most() -> None:
    tokens = [plain_tokens(["a", "b", "c"]), plain_tokens(["d"])]
    tokens[0].old_logp = np.log(np.float32([0.5, 0.05, 0.4]))
    tokens[0].after_logp = tokens[0].old_logp + np.float32([0.1, 3, -0.2])
    tokens[1].old_logp = tokens[1].after_logp = np.log(np.float32([0.5]))
    lively = group_of(tokens, std=0.5)
    records = [
        step_of([group_of([], std=0.4)], step=1),
        step_of([group_of([], std=None), lively], step=2),
        step_of([], step=3),
    ]
    shown = tool.views(records, compares=False)["inspect"]
    assert (shown["step"], shown["group"], shown["token"]) == (2, 1, "0.2")


@needs_chromium
def test_it_takes_the_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word_run(tmp_path / "run", num_steps=5)
    tool.main([str(tmp_path / "run"), "--compare", str(tmp_path / "run"), "--out", str(tmp_path / "docs")])
    names = ["inspect", "inspect_follow", "inspect_compare"]
    assert [Path(line).stem for line in capsys.readouterr().out.splitlines()] == names
    for name in names:
        picture = (tmp_path / "docs" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and picture[16:24] == (1366).to_bytes(4, "big") + (768).to_bytes(4, "big")
        assert len(picture) > 20_000
