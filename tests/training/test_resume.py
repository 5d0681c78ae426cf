"""A run that is killed and resumed is the run that was never killed, bit for bit."""

import contextlib
import random
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers.fitting import fit, scalars, weights_of
from helpers.programs import programs
from helpers.tiny import model_of, tokenizer

from grpo_lightning import StepCheckpoint, UsageError

STEPS = 6
OPTIONS = f"""
seed_everything: 7
trainer:
  accelerator: cpu
  max_epochs: {STEPS}
  enable_progress_bar: false
  check_val_every_n_epoch: 3
model:
  rewards:
    - class_path: FormatReward
      init_args: {{pattern: ".*[a-m]+.*"}}
  sampling: {{max_new_tokens: 12}}
  objective: {{beta: 0.05}}
  optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 0.01}}}}
  lr_scheduler: {{class_path: torch.optim.lr_scheduler.LinearLR, init_args: {{total_iters: 20}}}}
  validation: {{samples: 2, judge: {{class_path: FormatReward}}}}
data:
  task: {{class_path: Arithmetic, init_args: {{num_train: 10, num_val: 8}}}}
loop: {{group_size: 4, prompts_per_step: 4, mu: 2, num_minibatches: 2, steps_per_iteration: 2}}
checkpoint: {{every_n_steps: 1}}
"""


def command(folder: Path, *more: str) -> list[str]:
    options = ["--config", str(folder.parent / "options.yaml"), "--model.policy.path", str(folder.parent / "policy")]
    where = ["--trainer.default_root_dir", str(folder), "--model.policy.dropout", "true"]
    return ["fit", *options, *where, *more]


def die_and_go_on(folder: Path, times: int, *more: str) -> None:
    """A run in `unbroken`; and one in `killed` that is killed so many times, at random moments, and ends at last."""
    with programs({"unbroken": command(folder / "unbroken", *more)}, folder) as started:
        begun = time.monotonic()
        assert started["unbroken"].wait() == 0, started["unbroken"].errors
        duration = time.monotonic() - begun
    moments = random.Random(0)
    on = command(folder / "killed", *more, "--ckpt_path", "last")
    for _ in range(times):
        with programs({"killed": on}, folder) as started, contextlib.suppress(subprocess.TimeoutExpired):
            # Kills during start-up only delay: most moments fall into the training.
            started["killed"].wait(duration * moments.uniform(0.3, 1.0))
    with programs({"last": on}, folder, anew=True) as started:
        code, errors = started["last"].wait(), started["last"].errors
    # A quick machine may have finished before the last kill; then there is nothing to go on with.
    assert code == (2 if f"has done {STEPS} steps already" in errors else 0), errors[-2000:]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    # GPT-2 for its dropout, which draws from the global generator.
    model_of("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "options.yaml").write_text(OPTIONS)
    return tmp_path


def test_sigkills_at_random_moments_change_nothing(runs: Path) -> None:
    die_and_go_on(runs, 3)
    unbroken, killed = weights_of(runs / "unbroken"), weights_of(runs / "killed")
    assert unbroken.keys() == killed.keys()
    assert all(torch.equal(unbroken[name], killed[name]) for name in unbroken)
    assert scalars(runs / "killed") == scalars(runs / "unbroken")


def test_another_runs_checkpoint_does_not_write_over_the_run_that_is_here(tmp_path: Path) -> None:
    def go(folder: Path, steps: int, path: Path | None = None) -> None:
        trainer = {"max_epochs": steps, "enable_checkpointing": True}
        fit(folder, [StepCheckpoint(keep=2)], trainer=trainer, ckpt_path=path)

    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir()}

    go(tmp_path / "here", 2)
    go(tmp_path / "other", 1)
    before = files(tmp_path / "here"), files(tmp_path / "other")
    with pytest.raises(UsageError, match="already holds a run"):
        go(tmp_path / "here", 3, tmp_path / "other" / "checkpoints" / "last.ckpt")
    # An empty folder takes it up, and leaves the other run alone.
    go(tmp_path / "new", 2, tmp_path / "other" / "checkpoints" / "last.ckpt")
    assert (files(tmp_path / "here"), files(tmp_path / "other")) == before
