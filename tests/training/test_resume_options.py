"""A run that goes on with other options takes them, and keeps everything else."""

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.command import Grpo
from helpers.fitting import Digits, checkpoint_of, equal, fit, resumes_exactly, scalars
from helpers.tiny import model_of, policy_of, tokenizer
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from grpo_lightning import GRPOModule, Objective, Policy, StepCheckpoint, UsageError
from grpo_lightning.policy.snapshots import FrozenCopy, MovingAverage


def adam(lr: float = 0.01, weight_decay: float = 0.0) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)


def go(folder: Path, steps: int, resume: Any = None, keep: StepCheckpoint | None = None, **options: Any) -> GRPOModule:
    """Fits up to `steps` steps; with AdamW, which has a state that must be kept."""
    trainer = {"max_epochs": steps} | options.pop("trainer", {})
    callbacks = [keep or StepCheckpoint(), *options.pop("callbacks", [])]
    options = {"optimizer": adam()} | options
    return fit(folder, callbacks, trainer=trainer, ckpt_path=resume, **options)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a constant rate, to go on with."""
    folder = tmp_path_factory.mktemp("half")
    go(folder, 2)
    return folder


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "run"))


def schedule(optimizer: torch.optim.Optimizer) -> LinearLR:
    return LinearLR(optimizer, start_factor=0.5, total_iters=4)


class Halving:
    """A user's schedule that derives from nothing of torch: the rate halves at every update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


SCHEDULES: dict[str, Any] = {
    "linear": schedule,
    "in turn": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=2), StepLR(optimizer, step_size=1)], milestones=[2]
    ),
    "one's own": Halving,
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_any_schedule_resumes_bit_for_bit_and_may_change_its_rate(make: Any, tmp_path: Path) -> None:
    resumes_exactly(tmp_path, lambda: {"optimizer": adam(), "lr_scheduler": make}, steps=3, cut=2)
    # On with half the rate: the fourth update has half of what it would have had.
    go(tmp_path / "whole", 4, "last", lr_scheduler=make)
    go(tmp_path / "cut", 4, "last", lr_scheduler=make, optimizer=adam(0.005))
    other, rates = (scalars(tmp_path / name)["optim/lr"] for name in ("cut", "whole"))
    assert other == rates | {3: pytest.approx(rates[3] / 2)}


def test_the_learning_rate_that_is_given_wins_and_the_moments_stay(run: Path, half: Path) -> None:
    go(run, 3, "last", optimizer=adam(lr=0.0, weight_decay=0.5))
    assert scalars(run)["optim/lr"] == pytest.approx({0: 0.01, 1: 0.01, 2: 0.0})
    before, after = checkpoint_of(half), checkpoint_of(run)
    group = after["optimizer_states"][0]["param_groups"][0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.0, 0.5, (0.9, 0.99))
    assert equal(after["state_dict"], before["state_dict"])
    # exp_avg <- 0.9 exp_avg + 0.1 gradient: what was there is not forgotten.
    assert [state["step"] for state in after["optimizer_states"][0]["state"].values()].count(torch.tensor(3.0)) > 0


def test_a_schedule_may_be_added_and_taken_away(run: Path, tmp_path: Path) -> None:
    go(run, 3, "last", lr_scheduler=schedule)
    # start_factor 0.5 grows to 1 over 4 updates: at the third update 0.5 + 0.5 * 2 / 4.
    assert scalars(run)["optim/lr"][2] == pytest.approx(0.01 * 0.75)
    go(run, 4, "last")
    assert scalars(run)["optim/lr"][3] == pytest.approx(0.01)


# Snapshots.


@pytest.mark.parametrize("snapshot", [FrozenCopy, MovingAverage])
def test_an_old_policy_and_numpys_generator_resume_bit_for_bit(snapshot: Any, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        draws = Digits(change=lambda sample, share: share + numpy.random.rand())  # as a user's reward may
        return {"optimizer": adam(), "old_policy": snapshot(), "loop": {"mu": 2}, "rewards": [draws]}

    resumes_exactly(tmp_path, options)


def test_beta_and_the_kind_of_reference_may_change(tmp_path: Path) -> None:
    start = policy_of(scale=0.05).state_dict()
    module = go(tmp_path, 1)
    assert module.reference is None
    module = go(tmp_path, 2, "last", objective=Objective(beta=0.1))
    # A reference that was not there is the model the run began with.
    assert module.reference is not None
    assert equal(module.reference.policy.state_dict(), start)
    loop = {"steps_per_iteration": 3}  # the fourth step would be the next to move it
    module = go(tmp_path, 3, "last", objective=Objective(beta=0.1), reference=MovingAverage(0.5), loop=loop)
    assert module.reference is not None
    assert equal(module.reference.policy.state_dict(), start)
    assert go(tmp_path, 4, "last").reference is None
    assert not any(name.startswith("reference.") for name in checkpoint_of(tmp_path)["state_dict"])


# Where checkpoints are, and which stay.


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_retention_follows_the_options_of_the_resumed_run(tmp_path: Path) -> None:
    go(tmp_path, 3, keep=StepCheckpoint(keep=2))
    assert kept(tmp_path) == ["last.ckpt", "step-2.ckpt", "step-3.ckpt"]
    go(tmp_path, 5, "last", keep=StepCheckpoint(keep=-1))
    assert kept(tmp_path) == ["last.ckpt", "step-2.ckpt", "step-3.ckpt", "step-4.ckpt", "step-5.ckpt"]
    moved = Path(shutil.move(tmp_path, tmp_path.with_name("moved")))
    (moved / "checkpoints" / "step-5.ckpt").unlink()
    go(moved, 6, "last", keep=StepCheckpoint(keep=2))
    assert kept(moved) == ["last.ckpt", "step-4.ckpt", "step-6.ckpt"]
    go(moved, 7, "last", keep=StepCheckpoint(keep=0))
    assert kept(moved) == ["last.ckpt"]


def test_another_monitor_or_mode_does_not_compare_with_the_old_scores(tmp_path: Path) -> None:
    script = [3.0, 1.0, 2.0, 0.5, 0.4, 9.0]  # one per step
    rewards = [Digits(change=lambda sample, share: script[sample.prompt.id // 4])]
    go(tmp_path, 2, keep=StepCheckpoint(keep=1), rewards=rewards)
    assert kept(tmp_path) == ["last.ckpt", "step-2.ckpt"]
    # Under the old monitor its score was 2, the number of the step.
    best = {"monitor": "reward/digits/mean", "keep": 1}
    go(tmp_path, 3, "last", keep=StepCheckpoint(**best, mode="min"), rewards=rewards)
    assert kept(tmp_path) == ["last.ckpt", "step-2.ckpt", "step-3.ckpt"]
    go(tmp_path, 5, "last", keep=StepCheckpoint(**best, mode="max"), rewards=rewards)
    assert kept(tmp_path) == ["last.ckpt", "step-2.ckpt", "step-3.ckpt", "step-4.ckpt"]


def test_a_run_may_go_on_with_other_sizes(tmp_path: Path) -> None:
    """Steps of 1, 4 and 2 updates; the prompts go on where they were."""
    keep: dict[str, Any] = {"mu": 1, "num_minibatches": 1, "group_size": 4}
    for steps, loop in enumerate(({}, {"mu": 2, "num_minibatches": 2}, {"mu": 2, "group_size": 2}), start=1):
        go(tmp_path, steps, None if steps == 1 else "last", loop=keep | loop)
    seen = scalars(tmp_path)
    assert sorted(seen["optim/lr"]) == sorted(seen["reward/mean"]) == [0, 1, 2]
    assert seen["optim/updates"] == {1: 4, 2: 2}
    assert checkpoint_of(tmp_path)["callbacks"]["GRPOLoop"]["source"] == {"drawn": 12}


def test_another_model_is_refused(run: Path) -> None:
    wide = Policy.from_model(model_of("llama", intermediate_size=56), tokenizer())
    with pytest.raises(
        UsageError, match=r"another model.* is \[48, 32\] in the checkpoint and \[56, 32\] in the model"
    ):
        go(run, 3, "last", policy=wide)
    deep = Policy.from_model(model_of("llama", num_hidden_layers=3), tokenizer())
    with pytest.raises(UsageError, match="is missing in the checkpoint"):
        go(run, 3, "last", policy=deep)


# Through the command line.


TWO = "--trainer.max_epochs=2"
LAST = "--ckpt_path=last"


def test_what_cannot_be_resumed_ends_with_one_message(grpo: Grpo, tmp_path: Path) -> None:
    grpo.ok("fit", TWO, "--checkpoint.keep=1")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    other = tmp_path / "other.ckpt"
    whole = last.read_bytes()
    files: dict[str, bytes] = {"cut.ckpt": whole[: len(whole) // 2], "text.ckpt": b"step 3\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    torch.save({"weights": torch.zeros(2)}, other)
    content = torch.load(last, weights_only=True)
    torch.save({key: value for key, value in content.items() if key != "optimizer_states"}, tmp_path / "weights.ckpt")
    elsewhere = "--trainer.default_root_dir=elsewhere"
    sgd = ["--trainer.max_epochs=3", "--model.optimizer=SGD", "--model.optimizer.lr=1"]
    for verb, path, options, words in (
        ("fit", "last", [TWO], ["trainer.max_epochs=2", "has done 2 steps", "--trainer.max_epochs 4"]),
        ("fit", "last", sgd, ["SGD", "AdamW"]),
        ("fit", "cut.ckpt", [elsewhere], ["cut.ckpt", "damaged", "other.ckpt"]),
        ("validate", "text.ckpt", [elsewhere], ["text.ckpt", "checkpoint"]),
        ("fit", "other.ckpt", [elsewhere], ["other.ckpt", "not a checkpoint of `grpo fit`"]),
        ("fit", "weights.ckpt", [elsewhere], ["weights.ckpt", "the weights alone"]),
    ):
        message = grpo.mistake(verb, f"--ckpt_path={path}", *options).splitlines()[-1]
        assert all(word in message for word in words), message
    assert not (tmp_path / "elsewhere").exists()
    last.write_bytes(files["cut.ckpt"])
    message = grpo.mistake("fit", LAST, "--trainer.max_epochs=3").splitlines()[-1]
    assert "damaged" in message and "step-2.ckpt" in message


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_last_of_a_folder_without_a_run_is_said(grpo: Grpo, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code, _, errors = grpo("fit", LAST)
    assert code == 0
    assert "does not exist yet, so this run starts with step 1" in caplog.text
    assert "save_last" not in caplog.text + errors
    # It is found without the callback that writes it, too.
    grpo.ok("fit", LAST, TWO, "--trainer.enable_checkpointing=false")
    assert sorted(scalars(tmp_path / "run")["optim/lr"]) == [0, 1]
