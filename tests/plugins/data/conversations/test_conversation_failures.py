"""A whole `grpo fit` whose environments misbehave, and the same, killed by an environment in the middle of a step."""

import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.command import OPTIONS, Grpo, arguments
from helpers.fast import policy_of
from helpers.fitting import checkpoint_of, scalars, weights_of
from helpers.programs import programs
from helpers.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

GAME = [
    *(f"--{key}!" for key in OPTIONS if key.startswith("data.task")),
    "--data.task=helpers.guessing.Guess",
    "--data.limits.max_turns=3",
    "--data.limits.seconds=0.3",
    "--model.rewards=[EnvironmentReward]",
    "--model.guard.max_failed_rewards=1",
    "--model.sampling.max_new_tokens=6",
    f"--model.sampling.stop={[*'abcdefghijklmnopqrstuvwxyz']}",
    "--model.optimizer.lr=0.01",
    "--loop.prompts_per_step=4",
    "--loop.group_size=3",
    "--trainer.limit_val_batches=0",
    "--checkpoint.every_n_steps=1",
    "--inspect.every_n_steps=0",
]
FAIL = '{"1": "hang", "2": "fork", "3": "raise", "4": "shout", "5": "die", "9": "kill"}'


def options_of(name: str, *more: str) -> list[str]:
    return [*GAME, f"--data.task.fail={FAIL}", "--trainer.max_epochs=3", f"--trainer.default_root_dir={name}", *more]


def left_by(folder: Path) -> Iterator[str]:
    """What processes of a run have left: those that have its folder in their environment, and temporary files."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"={folder / 'files'}".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                yield str((path.parent / "cmdline").read_bytes())
        except OSError:
            pass
    yield from map(str, (folder / "files").glob("grpo-environments-*"))


def test_a_run_killed_while_environments_run_goes_on_bit_for_bit(
    tmp_path: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_of(scale=0.05).save_pretrained(tmp_path / "policy")
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "files"))
    monkeypatch.setenv("KILLED", str(tmp_path / "was-killed"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with programs({"broken": arguments("fit", *options_of("broken"))}, tmp_path, anew=True) as started:
        assert started["broken"].wait() == -signal.SIGKILL, started["broken"].errors
    assert (tmp_path / "was-killed").exists()
    last = checkpoint_of(tmp_path / "broken")
    assert 0 <= last["epoch"] < 2, "it was killed after the first step and before the last"
    wait_until(lambda: not [*left_by(tmp_path)])
    for name, more in (("broken", ["--ckpt_path=last"]), ("whole", [])):
        command.ok("fit", *options_of(name, *more))
    assert not [*left_by(tmp_path)]
    expected, actual = (weights_of(tmp_path / name) for name in ("whole", "broken"))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    logged = scalars(tmp_path / "whole")
    assert logged == scalars(tmp_path / "broken")
    assert max(logged["rollout/turns"].values()) > 1
    assert 0 < sum(logged["rollout/environment_failed"].values()) / 3 < 0.7
    assert all(math.isfinite(value) for value in logged["optim/grad_norm"].values())
