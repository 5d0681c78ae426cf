"""A run goes on with other devices and another strategy: 1 -> 4 -> 2 -> 1."""

from pathlib import Path

import pytest
from helpers.command import Grpo
from helpers.fitting import scalars
from helpers.tiny import policy_of
from test_sharding import OPTIONS, TWO, assert_close, finish

LAST = "--ckpt_path=last"


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
