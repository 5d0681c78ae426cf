"""A run goes on with other devices, another strategy and other options at once: 1 -> 2 -> 1, and 1 -> 4 -> 2 -> 1."""

from pathlib import Path

import pytest
import torch
from helpers.command import Grpo
from helpers.fitting import scalars
from helpers.tiny import policy_of
from test_sharding import FSDP2, OPTIONS, TWO, assert_close, finish

LAST = "--ckpt_path=last"
MORE = ["--model.old_policy=FrozenCopy", "--checkpoint.keep=3"]
OTHER = ["--model.optimizer.lr=0.0005", "--checkpoint.keep=1", "--checkpoint.monitor=val/reward"]
"""Of the third step on: another rate under the schedule, and another rule for what is kept."""


def test_one_two_one(tmp_path: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    policy_of(scale=0.05).save_pretrained(tmp_path / "policy")
    rows = (f'{{"question": "{"1" * row}", "answer": "{row}"}}\n' for row in range(1, 10))
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    options = [option for option in OPTIONS if "Shares" not in option and "max_epochs" not in option] + MORE

    def fit(name: str, steps: int, *more: str) -> None:
        code, _, errors = command(
            "fit", *options, f"--trainer.max_epochs={steps}", f"--trainer.default_root_dir={name}", *more
        )
        assert code == 0, errors

    for name in ("one", "ddp", "fsdp2"):
        fit(name, 2)
    three = [*MORE, LAST, "--trainer.max_epochs=3", *OTHER]
    finish({"ddp": [*TWO, "--trainer.strategy=ddp", *three], "fsdp2": [*FSDP2, *three]}, tmp_path)
    fit("one", 3, LAST, *OTHER)
    for name in ("one", "ddp", "fsdp2"):
        fit(name, 4, LAST, *OTHER)

    one = scalars(tmp_path / "one")
    # LinearLR grows from a third to the whole of the rate over 5 updates; the third step begins with the ninth.
    rates = [0.001 * (1 / 3 + 2 / 3 * min(1, update / 5)) for update in range(8)] + [0.0005] * 8
    # A step has the mean over its four updates.
    means = [sum(rates[first : first + 4]) / 4 for first in range(0, 16, 4)]
    assert one["optim/lr"] == pytest.approx(dict(enumerate(means)))
    for name in ("ddp", "fsdp2"):
        assert_close(scalars(tmp_path / name), one, 1e-5)
        saved = torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)
        assert not any(part.startswith("old_policy.") for part in saved["state_dict"])
        # Those kept by the number of the step stay; of the others the best by val/reward, once it was measured.
        kept = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        assert kept == ["last.ckpt", "step-1.ckpt", "step-2.ckpt", "step-4.ckpt"]


def test_one_four_two_one(tmp_path: Path, command: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded over four, copied on two, and alone: the numbers are those of a run that was alone all the time."""
    policy_of(scale=0.05).save_pretrained(tmp_path / "policy")
    rows = (f'{{"question": "{"1" * row}", "answer": "{row}"}}\n' for row in range(1, 10))
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    for_four = ["--loop.prompts_per_step=8"]  # every rank takes one for each of two updates
    options = [option for option in OPTIONS if "Shares" not in option and "max_epochs" not in option] + for_four

    def alone(name: str, steps: int, *more: str) -> None:
        where = [f"--trainer.default_root_dir={name}", f"--trainer.max_epochs={steps}"]
        code, _, errors = command("fit", *options, *where, *more)
        assert code == 0, errors

    alone("whole", 4)
    alone("moved", 1)
    four = ["--trainer.devices=4", "--trainer.strategy=fsdp2", "--trainer.max_epochs=2", LAST]
    finish({"moved": [*for_four, *four]}, tmp_path)
    finish({"moved": [*for_four, *TWO, "--trainer.strategy=ddp", "--trainer.max_epochs=3", LAST]}, tmp_path)
    alone("moved", 4, LAST)
    # Left out is what is recorded in the last step of each start, which is always validated too.
    moved, whole = (
        {n: v for n, v in scalars(tmp_path / run).items() if n[:7] != "update/"} for run in ("moved", "whole")
    )
    for name in [name for name in whole if "val" in name.replace("/", " ").split()]:
        assert list(moved[name]) == [-1, 0, 1, 2, 3] and list(whole[name]) == [-1, 1, 3], name
        moved[name] = {step: moved[name][step] for step in whole[name]}
    assert_close(moved, whole, 1e-5)
