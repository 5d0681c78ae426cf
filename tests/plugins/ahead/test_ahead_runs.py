"""Ahead in runs of its own processes: two ranks, and kills at random moments."""

import contextlib
import random
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers.fast import policy_of
from helpers.fitting import scalars, weights_of
from helpers.paths import ROOT
from helpers.programs import programs
from helpers.tiny import tokenizer

STEPS = 20
OPTIONS = f"""
seed_everything: 7
trainer: {{accelerator: cpu, max_epochs: {STEPS}, enable_progress_bar: false, check_val_every_n_epoch: 7}}
model:
  engine: {{class_path: helpers.elsewhere.Elsewhere, init_args: {{seconds: 0.1}}}}
  rewards: [{{class_path: FormatReward, init_args: {{pattern: ".*[a-m]+.*"}}}}]
  sampling: {{max_new_tokens: 12}}
  optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 0.01}}}}
  validation: {{samples: 2, judge: {{class_path: FormatReward}}}}
data:
  task: {{class_path: Arithmetic, init_args: {{num_train: 10, num_val: 8}}}}
loop: {{group_size: 4, prompts_per_step: 4, mu: 2, num_minibatches: 2}}
checkpoint: {{every_n_steps: 1}}
inspect: {{every_n_steps: 9}}
"""


def command(folder: Path, source: str, *more: str) -> list[str]:
    options = ["--config", str(folder.parent / "options.yaml"), "--model.policy.path", str(folder.parent / "policy")]
    return ["fit", *options, "--trainer.default_root_dir", str(folder), f"--loop.source={source}", *more]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    policy_of().save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "options.yaml").write_text(OPTIONS)
    return tmp_path


def same(one: Path, other: Path) -> None:
    first, second = weights_of(one), weights_of(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert repr(sorted(scalars(one).items())) == repr(sorted(scalars(other).items()))


def test_two_ranks_have_a_lag_of_one_step(runs: Path) -> None:
    for name, source in (("stale", "StaleSource"), ("ahead", "Ahead")):
        ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--checkpoint.every_n_steps=100"]
        with programs({name: command(runs / name, source, *ranks)}, runs) as started:
            assert started[name].wait() == 0, started[name].errors[-3000:]
    same(runs / "stale", runs / "ahead")


def test_sigkills_at_random_moments_change_nothing(runs: Path) -> None:
    moments, resume = random.Random(0), ("--ckpt_path", "last")
    with programs({"unbroken": command(runs / "unbroken", "Ahead")}, runs) as started:
        begun = time.monotonic()
        assert started["unbroken"].wait() == 0, started["unbroken"].errors[-3000:]
        duration = time.monotonic() - begun
    for _ in range(6):
        killed = programs({"killed": command(runs / "killed", "Ahead", *resume)}, runs)
        with killed as started, contextlib.suppress(subprocess.TimeoutExpired):
            started["killed"].wait(duration * moments.uniform(0.2, 0.6))
    with programs({"last": command(runs / "killed", "Ahead", *resume)}, runs) as started:
        code, errors = started["last"].wait(), started["last"].errors
    assert code == (2 if f"has done {STEPS} steps already" in errors else 0), errors[-2000:]
    same(runs / "unbroken", runs / "killed")
