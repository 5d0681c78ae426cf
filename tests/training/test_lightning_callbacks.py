"""Every callback of Lightning's works in a run, or is refused in one sentence before anything is written."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from helpers.fitting import CLOCK, fit, scalars
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)

from grpo_lightning import UsageError
from grpo_lightning.training.checks import REFUSED_CALLBACKS

REFUSED: dict[str, tuple[Callable[[], L.Callback], str]] = {
    "BackboneFinetuning": (BackboneFinetuning, "model.policy.adapter"),
    "BaseFinetuning": (BaseFinetuning, "Derive a class"),
    "BatchSizeFinder": (BatchSizeFinder, "loop.max_tokens"),
    "GradientAccumulationScheduler": (lambda: GradientAccumulationScheduler({0: 2}), "loop.max_tokens"),
    "LearningRateFinder": (LearningRateFinder, "model.optimizer.lr"),
    "ModelPruning": (lambda: ModelPruning("l1_unstructured"), "model.policy.path"),
    "OnExceptionCheckpoint": (lambda: OnExceptionCheckpoint("run"), "ckpt_path=last"),
    "SpikeDetection": (SpikeDetection, "model.guard.max_bad_updates"),
    "StochasticWeightAveraging": (lambda: StochasticWeightAveraging(1e-3), "Use EMAWeightAveraging"),
    "ThroughputMonitor": (lambda: ThroughputMonitor(lambda batch: 1), "perf/tokens_per_second"),
}

TOGETHER: dict[str, Callable[[], list[L.Callback]]] = {
    "monitors": lambda: [
        L.Callback(),
        Checkpoint(),
        DeviceStatsMonitor(),
        EarlyStopping("reward/mean", mode="max"),
        LearningRateMonitor(),
        ModelCheckpoint(),
        RichModelSummary(),
        RichProgressBar(),
    ],
    "others": lambda: [
        type("Writer", (BasePredictionWriter,), {})("batch"),
        EMAWeightAveraging(),
        LambdaCallback(on_fit_start=lambda *args: None),
        ModelSummary(),
        Timer("00:01:00:00"),
        TQDMProgressBar(),
    ],
    "bases": lambda: [ProgressBar(), WeightAveraging()],
}
"""The callbacks that work, by the run that has them."""


def test_every_callback_of_lightning_is_tried_here() -> None:
    working = {kind.__name__ for callbacks in TOGETHER.values() for made in callbacks() for kind in type(made).__mro__}
    public = {name for name in lightning_callbacks.__all__ if isinstance(getattr(lightning_callbacks, name), type)}
    assert REFUSED.keys() == REFUSED_CALLBACKS.keys()
    assert public - working == {*REFUSED}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*(The last model of|no last checkpoint)")
def test_a_refused_callback_is_named_with_advice_and_nothing_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, instead = REFUSED[name]
    # Classes that derive from one are refused with it, but for those that choose what to freeze.
    derived = type("Mine", (type(make()),), {})
    for kind in [type(make())] if name == "BaseFinetuning" else [type(make()), derived]:
        callback = make()
        callback.__class__ = kind
        with pytest.raises(UsageError) as caught:
            fit(tmp_path / "run", [callback])
        assert str(caught.value).startswith(f"trainer.callbacks={kind.__name__}: ") and instead in str(caught.value)
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("names", TOGETHER)
@pytest.mark.filterwarnings("ignore")
def test_all_other_callbacks_work(names: str, tmp_path: Path) -> None:
    trainer: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 1}
    module = fit(tmp_path, TOGETHER[names](), trainer=trainer | {"enable_progress_bar": True})
    assert module.policy.version == 1 and 0 in scalars(tmp_path, (*CLOCK, "DeviceStats"))["val/reward"]


class Freezes(BaseFinetuning):
    """Trains the last norm from the second step on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.policy.model.model.norm)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.policy.model.model.norm, optimizer)


def test_a_callback_that_freezes_by_itself_works(tmp_path: Path) -> None:
    norms: list[torch.Tensor] = []

    def note(trainer: L.Trainer, module: Any) -> None:
        norms.append(module.policy.model.model.norm.weight.detach().clone())

    watch = LambdaCallback(on_train_epoch_start=note, on_train_epoch_end=note)
    fit(tmp_path, [Freezes(), watch], trainer={"max_epochs": 2})
    assert torch.equal(norms[0], norms[1]) and not torch.equal(norms[2], norms[3])


class Hooks(L.Callback):
    """Counts the calls of the hooks that stand around an update."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        assert all(parameter.grad is not None for parameter in pl_module.policy.parameters())
        self.calls["zero_grad"] += 1

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.calls["backward"] += 1


def test_hooks_around_an_update_are_called(tmp_path: Path) -> None:
    hooks = Hooks()
    fit(tmp_path, [hooks], loop={"mu": 2})
    assert hooks.calls == {"zero_grad": 6, "backward": 6}
