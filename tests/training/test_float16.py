"""`16-mixed`: the scale of the gradients, which an overflow halves, and which nothing else shows."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.command import Grpo
from helpers.fitting import Digits, Gradients, checkpoint_of, fit, resumes_exactly, scalars, weights_of
from lightning.pytorch.plugins import MixedPrecision

from grpo_lightning import GroupMean
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.training.checkpoint_files import AtomicCheckpointIO


def half(**options: Any) -> dict[str, Any]:
    """The trainer's options for float16 on a CPU, which Lightning's `precision` does not give; those of the scaler."""
    scaler = torch.amp.GradScaler("cpu", **options)
    return {"plugins": [AtomicCheckpointIO(), MixedPrecision("16-mixed", "cpu", scaler)]}


def scaler_of(folder: Path) -> dict[str, Any]:
    return checkpoint_of(folder)["MixedPrecision"]


def test_the_norm_is_that_of_the_gradient_whatever_the_scale(tmp_path: Path) -> None:
    seen = {scale: Gradients() for scale in (1.0, 2.0**12)}
    for scale, gradients in seen.items():
        options = half(init_scale=scale) | {"max_epochs": 1}
        fit(tmp_path / str(scale), [gradients], trainer=options, grad_clip=1e-3)
        clipped = torch.cat([gradient.flatten() for gradient in gradients.updates[0].values()])
        assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-3)
    norms = [scalars(tmp_path / str(scale))["optim/grad_norm"][0] for scale in seen]
    assert norms[0] == pytest.approx(norms[1], rel=0.02) and norms[0] > 1e-2


def test_an_overflow_halves_the_scale_and_is_no_bad_update(tmp_path: Path) -> None:
    options = half(init_scale=2.0**40, backoff_factor=2.0**-4, growth_interval=3)
    options |= {"max_epochs": 10, "enable_checkpointing": True}
    module = fit(tmp_path, [StepCheckpoint()], trainer=options, max_bad_updates=2)
    assert "optim/bad_updates" not in scalars(tmp_path)
    state = weights_of(tmp_path)
    assert (int(state["bad_updates"]), int(state["bad_updates_in_a_row"])) == (0, 0)
    # Overflows until the gradients fit, then three updates that double the scale, and those that are left.
    num_overflows = 10 - module.policy.version
    scaler = scaler_of(tmp_path)
    assert num_overflows > 2
    assert (scaler["scale"], scaler["_growth_tracker"]) == (
        2.0 ** (40 - 4 * num_overflows + module.policy.version // 3),
        module.policy.version % 3,
    )


def test_overflows_that_no_scale_prevents_stop_the_run(tmp_path: Path) -> None:
    """The first gradients overflow at 8, 4 and 2, which lowers the scale; from 1 on they are too large themselves."""
    overflowing = [Digits(change=lambda sample, fraction: 1e9 * fraction)]
    message = r"2 updates in a row .*gradient norm (inf|nan), scale of the float16 gradients 0\.5\); guard"
    gradients = Gradients()
    with pytest.raises(FloatingPointError, match=message):
        fit(
            tmp_path,
            [gradients],
            trainer=half(init_scale=8.0) | {"max_epochs": 9},
            rewards=overflowing,
            advantage=GroupMean(),
            max_bad_updates=2,
        )
    assert not gradients.updates


class Spoils(L.Callback):
    """Makes the policy's log-probs NaN."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            pl_module.policy.head.embedding.weight.fill_(torch.nan)


def test_an_objective_that_is_not_finite_stops_the_run_at_any_scale(tmp_path: Path) -> None:
    message = r"2 updates in a row .*objective nan, .*scale of the float16 gradients 32768\)"
    with pytest.raises(FloatingPointError, match=message):
        fit(tmp_path, [Spoils()], loop={"mu": 2}, trainer=half(), max_bad_updates=2)


def test_a_resumed_run_has_the_scale_that_it_had(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"trainer": half(init_scale=2.0**28, backoff_factor=2.0**-12, growth_interval=2)}

    resumes_exactly(tmp_path, options, steps=5, cut=2)
    assert scaler_of(tmp_path / "cut") == scaler_of(tmp_path / "whole")
    assert scaler_of(tmp_path / "cut")["scale"] == 2.0**18  # 28 - 12, and doubled twice


def test_on_a_cpu_16_mixed_is_refused_with_what_works(grpo: Grpo) -> None:
    errors = grpo.mistake("fit", "--trainer.precision=16-mixed")
    words = errors[errors.index("--trainer.plugins") :].split()
    assert "trainer.precision=16-mixed: Lightning takes bfloat16 in its place on a CPU" in errors
    grpo.ok("fit", *words, "--model.engine.dtype=float16")
    assert scaler_of(Path("run"))["scale"] == 2.0**16
