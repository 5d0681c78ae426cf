"""The core alone: `plugins/` is taken off the import path, and a whole run trains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fitting import scalars
from helpers.paths import TESTS, environment
from helpers.tiny import model_of, tokenizer


@pytest.mark.whole
def test_a_whole_fit_needs_no_plugin(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    rows = [{"question": f"{row} + {row} =", "answer": str(2 * row)} for row in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "brief.py").write_text("def brief(sample):\n    return sum(map(ord, sample.text)) % 7 / 7\n")
    options = {
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": "2",
        "trainer.default_root_dir": "run",
        "model.policy.path": "policy",
        "model.rewards": '[{"class_path": "FunctionReward", "init_args": {"function": "brief:brief"}}]',
        "model.sampling.max_new_tokens": "8",
        "model.objective.beta": "0.1",
        "data.task": "JsonPrompts",
        "data.task.train": "rows.jsonl",
        "data.task.val": "rows.jsonl",
        "loop.prompts_per_step": "4",
        "loop.group_size": "4",
        "loop.mu": "2",
    }
    given = [f"--{key}={value}" for key, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lightning", "fit", *given],
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
