"""Runs with Lightning's `EMAWeightAveraging`: what they train, validate, save, and how they go on."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers.adapters import adapted
from helpers.copying import Copying
from helpers.fitting import checkpoint_of, equal, fit, resumes_exactly, scalars, weights_of
from helpers.tiny import policy_of
from lightning.pytorch.callbacks import EMAWeightAveraging

from grpo_lightning import FrozenCopy, Objective, StepCheckpoint, UsageError
from grpo_lightning.training.averages import check_averages
from grpo_lightning.training.module import GRPOModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*WeightAveraging"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
]
VALIDATING = {"limit_val_batches": 1}


class Average(EMAWeightAveraging):
    """A fast one; averages may begin after an update, or after a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(decay=0.5, **options)


class Engines(L.Callback):
    """Sees at every update how far an engine's copy is from the policy, and whether the run says that it is none."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: GRPOModule, batch: Any, *args: Any) -> None:  # type: ignore[override]
        copied = module.explorer.engine.copied  # type: ignore[attr-defined]
        self.seen.append((batch.on_policy, equal(module.policy.state_dict(), copied.state_dict())))


class Heads(L.Callback):
    """Keeps the policy's head after each update, and as each validation finds it."""

    def __init__(self) -> None:
        self.heads: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: GRPOModule, *args: Any) -> None:  # type: ignore[override]
        self.heads.append(module.policy.head.embedding.weight.detach().clone())

    def on_validation_batch_start(self, trainer: L.Trainer, module: GRPOModule, *args: Any) -> None:  # type: ignore[override]
        self.validated.append(module.policy.head.embedding.weight.clone())


def test_an_engine_with_copies_samples_policy_and_validates_average(tmp_path: Path) -> None:
    engines, heads = Engines(), Heads()
    fit(tmp_path / "copies", [engines, Average()], engine=Copying(), trainer=VALIDATING)
    assert engines.seen == [(True, True)] * 3
    fit(tmp_path / "shared", [heads, Average()], trainer=VALIDATING)
    # The first validation is before the first update, which is copied; each further one is half of the average.
    average = heads.heads[0]
    for validated_head, head in zip(heads.validated[1:], heads.heads, strict=True):
        average = (average + head) / 2
        torch.testing.assert_close(validated_head, average)
    assert not heads.validated[3].equal(heads.heads[2])
    copies, shared = scalars(tmp_path / "copies"), scalars(tmp_path / "shared")
    assert "val/avg@2" in shared and {name: copies[name] for name in shared} == shared
    plain = scalars(fit_plainly(tmp_path / "plain"))
    assert {name for name in shared if shared[name] != plain[name]} <= {name for name in plain if "val/" in name}


def fit_plainly(folder: Path, **options: Any) -> Path:
    """The same run without an average."""
    fit(folder, [StepCheckpoint()], trainer=VALIDATING, **options)
    return folder


@pytest.mark.parametrize("start", [{"update_starting_at_step": 9}, {"update_every_n_steps": 0}], ids=str)
def test_until_it_begins_the_average_is_the_policy_as_it_is(tmp_path: Path, start: dict[str, int]) -> None:
    module = fit(tmp_path / "late", [Average(**start), StepCheckpoint()], trainer=VALIDATING)
    plain = fit_plainly(tmp_path / "plain")
    assert scalars(tmp_path / "late") == scalars(plain)
    expected = weights_of(plain)
    saved = checkpoint_of(tmp_path / "late")
    assert equal(saved["state_dict"], expected) and equal(saved["current_model_state"], expected)
    assert equal(module.state_dict(), expected)


def test_an_average_that_moves_at_the_end_of_steps_begins_there(tmp_path: Path) -> None:
    heads = Heads()
    callbacks = [heads, Average(update_every_n_steps=0, update_starting_at_epoch=1), StepCheckpoint()]
    fit(tmp_path, callbacks)
    head = weights_of(tmp_path)["policy.model.lm_head.weight"]
    torch.testing.assert_close(head, (heads.heads[1] + heads.heads[2]) / 2)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "weights": lambda: {"objective": Objective(beta=0.1)},
    "a copy as π_old": lambda: {"old_policy": FrozenCopy(), "loop": {"mu": 2}},
    "adapter": lambda: {"policy": adapted(moved=0.05), "objective": Objective(beta=0.1)},
    "adapter, copies": lambda: {
        "policy": adapted(moved=0.05),
        "objective": Objective(beta=0.1),
        "old_policy": FrozenCopy(),
        "reference": FrozenCopy(),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_cut_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    resumes_exactly(tmp_path, lambda: KINDS[kind]() | {"callbacks": [Average()], "trainer": VALIDATING})
    whole, cut = checkpoint_of(tmp_path / "whole"), checkpoint_of(tmp_path / "cut")
    for name in ("current_model_state", "averaging_state"):
        assert equal(whole[name], cut[name])
    # Both hold what a checkpoint without an average holds, and the average moves what is trained alone.
    assert whole["state_dict"].keys() == whole["current_model_state"].keys()
    for name, value in whole["state_dict"].items():
        assert value.equal(whole["current_model_state"][name]) is not name.startswith("policy."), name


@pytest.mark.parametrize("kind", ["weights", "adapter, copies"])
def test_without_the_callback_a_run_resumes_from_the_trained_weights(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = fit_plainly(tmp_path / "plain", **KINDS[kind]())
    callbacks = [Average(), StepCheckpoint()]
    fit(tmp_path / "cut", callbacks, trainer={"max_epochs": 2} | VALIDATING, **KINDS[kind]())
    with caplog.at_level(logging.INFO):
        fit(tmp_path / "cut", [StepCheckpoint()], trainer=VALIDATING, ckpt_path="last", **KINDS[kind]())
    assert "The run goes on with the weights themselves" in caplog.text
    assert "current_model_state" not in checkpoint_of(tmp_path / "cut")
    assert equal(weights_of(tmp_path / "cut"), weights_of(plain))


def test_an_average_can_begin_when_a_run_goes_on(tmp_path: Path) -> None:
    fit(tmp_path, [StepCheckpoint()], trainer={"max_epochs": 1})
    heads = Heads()
    first = weights_of(tmp_path)["policy.model.lm_head.weight"]
    fit(tmp_path, [heads, Average(), StepCheckpoint()], ckpt_path="last")
    saved = checkpoint_of(tmp_path)
    assert saved["current_model_state"]["policy.model.lm_head.weight"].equal(heads.heads[1])
    average = (heads.heads[0] + heads.heads[1]) / 2
    torch.testing.assert_close(saved["state_dict"]["policy.model.lm_head.weight"], average)
    assert not first.equal(average)


def test_an_average_that_would_not_be_one_is_refused() -> None:
    trainer: Any = SimpleNamespace(callbacks=[StepCheckpoint(), Average()])
    check_averages(trainer, policy_of(), is_sharded=False)
    with pytest.raises(UsageError, match=r"^trainer\.callbacks=Average: it averages whole weights, .* Use ddp"):
        check_averages(trainer, policy_of(), is_sharded=True)
    half = policy_of()
    half.to(torch.bfloat16)
    half.dtype = torch.bfloat16
    with pytest.raises(UsageError, match=r"Average: model\.policy\.dtype=bfloat16 would round .*dtype=float32"):
        check_averages(trainer, half, is_sharded=False)
    # An adapter is float32, whatever the weights beneath it are.
    check_averages(trainer, adapted(dtype=torch.bfloat16), is_sharded=False)
    trainer.callbacks = [StepCheckpoint()]
    check_averages(trainer, half, is_sharded=True)
