"""In Python as on the command line: what a trainer may not be is said in one sentence, before anything is written."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.command import Grpo
from helpers.fitting import Echo, fit, made, weights_of
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    StrategyRegistry,
    XLAStrategy,
)

from grpo_lightning import GRPOModule, StepCheckpoint, TaskData, UsageError
from grpo_lightning.training.checks import check_strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "trainer.gradient_clip_val=1.0: use model.guard.grad_clip"),
        ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches=2: use loop.max_tokens"),
        ({"max_steps": 3}, r"trainer.max_steps=3: use trainer.max_epochs, exploration steps: max_steps / \(loop.mu x"),
        ({"limit_train_batches": 1}, "trainer.limit_train_batches=1: .*loop.mu"),
        ({"limit_train_batches": 0.5}, "trainer.limit_train_batches=0.5: .*loop.mu"),
        ({"overfit_batches": 1}, "trainer.overfit_batches=1: use few questions"),
        ({"reload_dataloaders_every_n_epochs": 1}, "trainer.reload_dataloaders_every_n_epochs=1"),
        ({"check_val_every_n_epoch": 0}, "trainer.check_val_every_n_epoch=0: give 1 or more"),
        ({"val_check_interval": 3}, "val_check_interval=3: .* a step has 2 .*check_val_every_n_epoch=3"),
        ({"precision": "bf16-true"}, "trainer.precision=bf16-true: .*bf16-mixed"),
        ({"precision": "16-true"}, "trainer.precision=16-true: float16 rounds"),
    ],
    ids=str,
)
def test_a_trainer_that_cannot_train_is_refused_before_anything_is_written(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        fit(tmp_path, loop={"mu": 2}, trainer={"limit_val_batches": 1} | options)
    assert [*tmp_path.iterdir()] == []


def test_a_fraction_of_the_validation_that_is_no_batch_is_refused(tmp_path: Path) -> None:
    data = TaskData(Echo(), val_batch_size=9)  # 24 questions in three batches
    with pytest.raises(UsageError, match=r"limit_val_batches=0.3: it leaves none of 3 batches.*val_batch_size=9"):
        fit(tmp_path, trainer={"limit_val_batches": 0.3}, data=data)
    fit(tmp_path, trainer={"limit_val_batches": 0.4, "max_epochs": 1}, data=data)
    module, trainer = made(tmp_path / "test", trainer={"limit_test_batches": 0.3})
    with pytest.raises(UsageError, match=r"limit_test_batches=0.3: it leaves none of 3 batches"):
        trainer.test(module, datamodule=data)


REFUSED = ("ddp_fork", "ddp_spawn", "ddp_notebook", "deepspeed", "fsdp", "xla", "single_xla", "single_tpu")
WORKING = {"ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "single_device", "fsdp2"}


@pytest.mark.parametrize("name", sorted({*StrategyRegistry.available_strategies(), "fsdp2"}))
def test_every_strategy_of_lightning_works_or_is_refused(name: str) -> None:
    if name in WORKING:
        check_strategy(name)
        return
    assert name.startswith(REFUSED)
    with pytest.raises(UsageError, match=rf"^trainer.strategy={name}: .*Use trainer.strategy=(ddp|fsdp2|auto)\b"):
        check_strategy(name)


def test_a_strategy_is_refused_by_its_class_and_by_how_it_starts_processes() -> None:
    class Mine(FSDPStrategy):
        """A subclass is refused as its base."""

    for kind in (Mine, DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy):
        with pytest.raises(UsageError, match=r"Use trainer.strategy="):
            check_strategy(kind.__new__(kind))
    for method in ("fork", "spawn", "forkserver"):
        with pytest.raises(
            UsageError, match=rf"trainer.strategy={method}: the trained weights would stay in processes"
        ):
            check_strategy(DDPStrategy(start_method=method))  # type: ignore[arg-type]
    for strategy in (DDPStrategy(), SingleDeviceStrategy(), L.Trainer(accelerator="cpu", logger=False).strategy):
        check_strategy(strategy)


def test_processes_that_fail_to_start_are_explained(tmp_path: Path) -> None:
    """Nothing of the module is called before Lightning sends it to other processes, which not every module survives."""
    with pytest.raises(UsageError, match=r"trainer.strategy=spawn: .*Use trainer.strategy=ddp"):
        fit(tmp_path, trainer={"strategy": "ddp_spawn", "devices": 2}, optimizer=lambda parameters: None)
    assert [*tmp_path.iterdir()] == []


def test_a_second_run_in_a_folder_is_refused_with_how_to_continue(tmp_path: Path) -> None:
    trainer: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1}
    fit(tmp_path, [StepCheckpoint()], trainer=trainer)
    weights = weights_of(tmp_path)
    with pytest.raises(UsageError, match=r"already holds a run. Continue it with ckpt_path=last, or choose") as caught:
        fit(tmp_path, [StepCheckpoint()], trainer=trainer)
    assert "--" not in str(caught.value)
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(tmp_path).items())


def test_a_module_is_not_made_of_a_checkpoint() -> None:
    with pytest.raises(UsageError, match=r"load_from_checkpoint\('last.ckpt'\): .*no policy.*ckpt_path=path"):
        GRPOModule.load_from_checkpoint("last.ckpt", policy=None, rewards=[])


def test_a_checkpoint_that_slurm_left_is_not_read_unasked(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run").mkdir()
    Path("run/hpc_ckpt_2.ckpt").write_bytes(b"")
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    errors = grpo.mistake("fit")
    assert "hpc_ckpt_2.ckpt: Lightning" in errors and "ckpt_path" in errors
    assert [path.name for path in Path("run").iterdir()] == ["hpc_ckpt_2.ckpt"]


def test_a_job_of_slurm_that_lightning_refuses_is_a_mistake(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert "--ntasks-per-node=2" in grpo.mistake("fit") and not Path("run").exists()
