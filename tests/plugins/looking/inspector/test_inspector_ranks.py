"""Two ranks, killed and resumed, record what one process records that nobody kills."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command import LEARNS, arguments, furnish
from helpers.fitting import scalars
from helpers.programs import programs

from grpo_lightning.plugins.looking.inspector import read
from grpo_lightning.plugins.looking.inspector.record import path_of

OPTIONS = [
    *LEARNS,
    "--trainer.max_epochs=3",
    "--trainer.check_val_every_n_epoch=2",
    "--model.optimizer=torch.optim.SGD",
    "--model.optimizer.lr=0.5",
    "--loop.prompts_per_step=6",
    "--loop.num_minibatches=3",
    "--inspect.every_n_steps=1",
    "--inspect.num_groups=3",
    "--inspect.num_followed=3",
    "--inspect.num_samples=2",
]
FSDP2 = ["--trainer.devices=2", "--trainer.strategy=fsdp2"]
DIES = ["--trainer.callbacks+=helpers.failing.Fails", "--trainer.callbacks.phase=saving", "--trainer.callbacks.step=2"]
DIES += ["--trainer.callbacks.kind=kill"]
LAST = "--ckpt_path=last"


def run(runs: dict[str, list[str]], folder: Path) -> dict[str, int]:
    """Fits each run in its folder, all at the same time; the exit codes."""
    commands = {
        name: arguments("fit", f"--trainer.default_root_dir={name}", *OPTIONS, *more) for name, more in runs.items()
    }
    with programs(commands, folder) as started:
        return {name: program.wait() for name, program in started.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    furnish(folder, {"1" * row: row for row in range(1, 10)}, scale=0.05)
    codes = run({"one": [], "two": [*FSDP2, *DIES]}, folder)
    assert codes["one"] == 0 and codes["two"] != 0
    # The record of the step is there, its checkpoint is not.
    assert len(read(folder / "two")) == 3
    (folder / "two" / "inspect" / "step-000007.jsonl").write_text("of a longer run\n")
    (folder / "two" / "inspect" / "step-000009.jsonl.partial").write_text('{"step')
    assert run({"two": [*FSDP2, LAST]}, folder) == {"two": 0}
    return folder


def check_alike(one: Any, other: Any, name: str = "") -> None:
    """Records are equal but for rounding, and for the order of equally likely tokens."""
    if is_dataclass(other):
        for field in fields(other):
            # Each start has a provenance of its own.
            if not field.name.startswith(("top_", "vocabulary", "provenance")):
                check_alike(getattr(one, field.name), getattr(other, field.name), field.name)
    elif isinstance(other, list):
        for part, whole in zip(one, other, strict=True):
            check_alike(part, whole, name)
    elif isinstance(other, np.ndarray) and other.dtype.kind == "f":
        tolerance = 1e-5 if other.dtype == np.float32 else 2e-3  # a float16 has ten bits
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=name)
    else:
        assert np.array_equal(one, other) if isinstance(other, np.ndarray) else one == other, name


def test_the_records_are_those_of_one_process(runs: Path) -> None:
    one, two = read(runs / "one"), read(runs / "two")
    assert [record.step for record in two] == [record.step for record in one] == [0, 1, 2, 3]
    assert [*map(path_of, [runs / "two"] * 4, range(4))] == sorted((runs / "two" / "inspect").iterdir())
    for ours, theirs in zip(two, one, strict=True):
        kinds = [group.kind for group in theirs.groups]
        assert kinds == ["train"] * (3 if theirs.step else 0) + ["validation"] * 3
        check_alike(ours, theirs)
    assert any(group.std for record in one for group in record.groups)


def test_the_metrics_are_those_of_one_process(runs: Path) -> None:
    one, two = scalars(runs / "one"), scalars(runs / "two")
    names = [metric for metric in one if metric.startswith("update/")]
    assert len(names) == 3
    for metric in names:
        assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-5)
