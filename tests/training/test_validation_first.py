"""Validation before the first step: where it stands, and that nothing else notices it."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fitting import Echo, fit, made, resumes_exactly, scalars
from lightning.pytorch.callbacks import EarlyStopping

from grpo_lightning import StepCheckpoint, TaskData

Run = dict[str, dict[int, float]]
VALIDATES: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 1}
SAVING: dict[str, Any] = {"enable_checkpointing": True}
ONE = VALIDATES | {"max_epochs": 1}


def go(folder: Path, first: bool = True, callbacks: Any = (), ckpt_path: str | None = None, **trainer: Any) -> Run:
    options = {"validate_first": first, "mu": 2}
    fit(folder, callbacks, loop=options, trainer=VALIDATES | trainer, ckpt_path=ckpt_path)
    return scalars(folder)


def test_it_stands_before_the_first_update_and_changes_nothing_else(tmp_path: Path) -> None:
    with_it, without = go(tmp_path / "with"), go(tmp_path / "without", first=False)
    names = [name for name in without if name.startswith("val/")]
    assert len(names) == 9
    for name in names:
        assert [*with_it[name]] == [-1, 0, 1, 2] and [*without[name]] == [0, 1, 2]
        with_it[name].pop(-1)
    assert with_it["epoch"].pop(-1) == -1
    assert with_it == without


def test_a_policy_that_does_not_move_is_validated_alike_after_every_step(tmp_path: Path) -> None:
    fit(tmp_path, trainer=VALIDATES, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    rewards = scalars(tmp_path)["val/reward"]
    assert [*rewards] == [-1, 0, 1, 2] and len({*rewards.values()}) == 1


class FirstValidations(L.Callback):
    """Notes the step before which Lightning validates first."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_sanity_check_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.steps.append(trainer.current_epoch)


@pytest.mark.parametrize("trainer", [{"limit_val_batches": 0}, {"fast_dev_run": True}])
def test_a_run_without_validation_and_a_trial_have_none(tmp_path: Path, trainer: dict[str, Any]) -> None:
    watch = FirstValidations()
    fit(tmp_path, [watch], trainer=VALIDATES | trainer)
    assert watch.steps == []


def test_a_resumed_run_does_not_repeat_it(tmp_path: Path) -> None:
    resumes_exactly(tmp_path, lambda: {"loop": {"mu": 2}, "trainer": {"limit_val_batches": 1}})
    alone = tmp_path / "alone"
    last = str(tmp_path / "whole" / "checkpoints" / "last.ckpt")
    assert -1 not in go(alone, callbacks=[StepCheckpoint()], ckpt_path=last, **SAVING | {"max_epochs": 4})["epoch"]


def test_a_second_fit_of_the_same_trainer_does_not_repeat_it(tmp_path: Path) -> None:
    watch = FirstValidations()
    module, trainer = made(tmp_path, [watch], trainer=ONE)
    trainer.fit(module, datamodule=data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data())
    assert watch.steps == [0] and [*scalars(tmp_path)["val/reward"]] == [-1, 0, 1]


def test_early_stopping_and_monitors_do_not_count_it(tmp_path: Path) -> None:
    for first in (True, False):
        # Its patience is used up after step 2, whatever came before the training.
        stopping = EarlyStopping("val/reward", mode="max", patience=1, min_delta=99.0)
        best = StepCheckpoint(keep=-1, monitor="val/reward")
        folder = tmp_path / str(first)
        seen = go(folder, first, [stopping, best], max_epochs=5, enable_checkpointing=True, check_val_every_n_epoch=1)
        assert [*seen["reward/mean"]] == [0, 1]
        assert sorted(Path(path).name for path in best.best_k_models) == ["step-1.ckpt", "step-2.ckpt"]


def data() -> TaskData:
    return TaskData(Echo(), val_batch_size=5)


def test_validate_stands_where_the_run_validated_these_weights(tmp_path: Path) -> None:
    seen = go(tmp_path / "run", callbacks=[StepCheckpoint(keep=-1)], enable_checkpointing=True)
    for step, name in ((1, "step-2.ckpt"), (2, "last.ckpt")):
        module, trainer = made(tmp_path / name, [StepCheckpoint()], trainer=ONE | SAVING)
        trainer.validate(module, data(), ckpt_path=tmp_path / "run" / "checkpoints" / name, verbose=False)
        found = scalars(tmp_path / name)
        assert found["val/reward"] == {step: seen["val/reward"][step]} and found["epoch"] == {step: step}
        assert trainer.current_epoch == 0  # a fit after it begins at the beginning
    module, trainer = made(tmp_path / "fresh", [StepCheckpoint()], trainer=ONE | SAVING)
    trainer.validate(module, data(), verbose=False)
    fresh = scalars(tmp_path / "fresh")
    assert fresh["val/reward"] == {-1: seen["val/reward"][-1]} and fresh["epoch"] == {-1: -1}
    trainer.fit(module, datamodule=data())
    # What the run has validated at these places, `validate` repeats.
    trainer.validate(module, data(), verbose=False)
    assert [*scalars(tmp_path / "fresh")["val/reward"]] == [-1, 0]
