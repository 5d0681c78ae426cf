"""Whole `grpo fit` runs whose environments misbehave, and one that an environment kills in the middle of a step."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.command import OPTIONS, arguments
from helpers.fitting import scalars
from helpers.paths import environment
from helpers.tiny import policy_of
from helpers.waiting import LIMIT, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

GAME = [
    *(f"--{key}!" for key in OPTIONS if key.startswith("data.task")),
    "--data.task=helpers.guessing.Guess",
    "--data.limits.max_turns=3",
    "--data.limits.seconds=1.5",
    "--model.rewards=[EnvironmentReward]",
    "--model.max_failed_rewards=1",
    "--model.sampling.max_new_tokens=6",
    f"--model.sampling.stop={[*'abcdefghijklmnopqrstuvwxyz']}",
    "--model.optimizer.lr=0.01",
    "--loop.prompts_per_step=4",
    "--loop.group_size=3",
    "--trainer.limit_val_batches=0",
    "--checkpoint.every_n_steps=1",
    "--inspect.every_n_steps=0",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy_of(scale=0.05).save_pretrained(tmp_path / "policy")
    (tmp_path / "files").mkdir()
    return tmp_path


def fit(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, whose temporary files are in `files`."""
    own = arguments("fit", *GAME, f"--trainer.default_root_dir={name}", *options)
    variables = environment(TMPDIR=str(folder / "files"), KILLED=str(folder / f"{name}-was-killed"))
    command = [sys.executable, "-m", "grpo_lightning", *own]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, timeout=LIMIT)


def left_by(folder: Path) -> Iterator[str]:
    """What processes of a run have left: those that have its folder in their environment, and temporary files."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"={folder / 'files'}".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                yield str((path.parent / "cmdline").read_bytes())
        except OSError:
            pass
    yield from map(str, (folder / "files").glob("grpo-environments-*"))


def test_what_environments_do_wrong_costs_their_completions_and_leaves_nothing(folder: Path) -> None:
    fail = '{"1": "hang", "2": "fork", "3": "raise", "4": "shout", "5": "die"}'
    done = fit(folder, "run", f"--data.task.fail={fail}", "--trainer.max_epochs=3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [*left_by(folder)]
    logged = scalars(folder / "run")
    # Three steps of four prompts: of the 12 questions some fail, and others do not.
    failed = [*logged["rollout/environment_failed"].values()]
    assert len(failed) == 3 and 0 < sum(failed) / 3 < 0.7
    statuses = {name for name, values in logged.items() if any(v > 0 for v in values.values())}
    assert len(statuses & {f"reward/environment_reward/{s}" for s in ("timeout", "error", "too_long", "crash")}) >= 3
    assert all(math.isfinite(value) for value in logged["optim/grad_norm"].values())


def test_a_run_killed_while_environments_run_goes_on_bit_for_bit(folder: Path) -> None:
    (folder / "whole-was-killed").touch()
    options = ['--data.task.fail={"8": "kill"}', "--trainer.max_epochs=4"]
    whole = fit(folder, "whole", *options)
    assert whole.returncode == 0, whole.stderr[-3000:]
    broken = fit(folder, "broken", *options)
    assert broken.returncode == -signal.SIGKILL and (folder / "broken-was-killed").exists()
    last = torch.load(folder / "broken" / "checkpoints" / "last.ckpt", weights_only=True)
    assert 0 <= last["epoch"] < 3, "it was killed after the first step and before the last"
    wait_until(lambda: not [*left_by(folder)])
    resumed = fit(folder, "broken", *options, "--ckpt_path=last")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    expected, actual = (
        torch.load(folder / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "broken")
    )
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert scalars(folder / "whole") == scalars(folder / "broken")
    assert scalars(folder / "whole")["rollout/turns"][3] > 1
