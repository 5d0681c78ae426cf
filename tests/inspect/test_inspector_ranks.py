"""Two ranks, killed and resumed, record what one process records that nobody kills."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from helpers.command import arguments
from helpers.fitting import scalars
from helpers.programs import programs
from helpers.tiny import policy_of

from grpo_lightning.plugins.inspect import read

OPTIONS = [
    "--trainer.max_epochs=3",
    "--trainer.check_val_every_n_epoch=2",
    '--model.rewards=[{"class_path": "FormatReward", "init_args": {"pattern": ".*[a-m]+.*"}}]',
    "--model.sampling.max_new_tokens=8",
    "--model.objective.beta=0.04",
    "--model.optimizer=torch.optim.SGD",
    "--model.optimizer.lr=0.5",
    "--loop.group_size=4",
    "--loop.prompts_per_step=6",
    "--loop.num_minibatches=3",
    "--loop.mu=2",
    "--loop.max_tokens=40",
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
    policy_of(scale=0.05).save_pretrained(folder / "policy")
    rows = (f'{{"question": "{"1" * row}", "answer": "{row}"}}\n' for row in range(1, 10))
    (folder / "rows.jsonl").write_text("".join(rows))
    codes = run({"one": [], "two": [*FSDP2, *DIES]}, folder)
    assert codes["one"] == 0 and codes["two"] != 0
    # The record of the step is there, its checkpoint is not.
    assert len(read(folder / "two")) == 3
    assert run({"two": [*FSDP2, LAST]}, folder) == {"two": 0}
    return folder


def test_the_records_are_those_of_one_process(runs: Path) -> None:
    one, two = read(runs / "one"), read(runs / "two")
    assert [record.step for record in two] == [record.step for record in one] == [0, 1, 2, 3]
    for ours, theirs in zip(two, one, strict=True):
        assert (ours.objective, ours.rewards) == (theirs.objective, theirs.rewards)
        kinds = [group.kind for group in theirs.groups]
        assert kinds == ["train"] * (3 if theirs.step else 0) + ["validation"] * 3
        for group, other in zip(ours.groups, theirs.groups, strict=True):
            for field in fields(other):
                if field.name not in ("completions", "vocabulary"):
                    assert getattr(group, field.name) == getattr(other, field.name), field.name
            for a, b in zip(group.completions, other.completions, strict=True):
                for field in fields(b):
                    if field.name != "tokens":
                        assert getattr(a, field.name) == getattr(b, field.name), field.name
                for field in fields(b.tokens):
                    x, y = getattr(a.tokens, field.name), getattr(b.tokens, field.name)
                    if isinstance(y, np.ndarray) and y.dtype.kind == "f":
                        tolerance = 1e-5 if y.dtype == np.float32 else 2e-3  # a float16 has ten bits
                        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=field.name)
                    elif not field.name.startswith("top_"):  # equally likely tokens may change their order
                        assert np.array_equal(x, y) if isinstance(y, np.ndarray) else x == y, field.name
    assert any(group.std for record in one for group in record.groups)


def test_the_metrics_are_those_of_one_process(runs: Path) -> None:
    one, two = scalars(runs / "one"), scalars(runs / "two")
    names = [metric for metric in one if metric.startswith("update/")]
    assert len(names) == 3
    for metric in names:
        assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-5)
