"""The core alone: `plugins/` is taken off the import path, and a whole run trains."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import arguments, furnish
from helpers.fitting import scalars
from helpers.paths import TESTS, environment


@pytest.mark.whole
def test_a_whole_fit_needs_no_plugin(tmp_path: Path) -> None:
    furnish(tmp_path, scale=0.05)
    (tmp_path / "brief.py").write_text("def brief(sample):\n    return sum(map(ord, sample.text)) % 7 / 7\n")
    reward = '--model.rewards=[{"class_path": "FunctionReward", "init_args": {"function": "brief:brief"}}]'
    sizes = ["--loop.prompts_per_step=4", "--loop.group_size=4", "--loop.mu=2", "--trainer.max_epochs=2"]
    given = arguments("fit", "--memory.*!", reward, *sizes, "--model.objective.beta=0.1", "--model.optimizer.lr=0.001")
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lightning", *given],
        cwd=tmp_path,
        env=environment(TESTS / "core_alone"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "grpo_lightning.plugins" not in config and "\ninspect:" not in config
    found = scalars(tmp_path / "run")
    assert {-1, 1} <= found["val/greedy"].keys()
    assert found["policy/ratio_max"][1] > 1 and found["policy/kl_ref"][1] > 0
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
