"""The loop and the update, in whole tiny runs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fitting import (
    AfterOne,
    Digits,
    Echo,
    Gradients,
    Minibatches,
    Steps,
    fit,
    made,
    of_updates,
    relative,
    scalars,
)
from torch import Tensor

from grpo_lightning import (
    GRPOModule,
    MicroBatch,
    Objective,
    PlainEngine,
    Policy,
    RewardResult,
    Sample,
    TaskData,
    Watcher,
)
from grpo_lightning.tasks.orders import Shuffled
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint


class Trains(L.Callback):
    """Every update finds the policy in training mode."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, GRPOModule) and pl_module.policy.training


def test_a_policy_learns(tmp_path: Path) -> None:
    fit(
        tmp_path,
        loop={"group_size": 8, "prompts_per_step": 8},
        trainer={"max_epochs": 20},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    )
    reward = scalars(tmp_path)["reward/mean"]
    assert reward[0] < 0.35 < 0.9 < reward[19]


def test_mu_passes_over_the_minibatches_of_one_exploration(tmp_path: Path) -> None:
    watch = Minibatches()
    fit(tmp_path, [watch, Trains()], loop={"mu": 3, "num_minibatches": 2}, trainer={"max_epochs": 2})
    assert len(watch.seen) == 2 * 3 * 2
    step = watch.seen[:6]
    rows = [
        sorted(torch.cat([micro_batch.rollouts.sample_index for micro_batch in batch.micro_batches]).tolist())
        for batch in step
    ]
    assert rows == [list(range(8)), list(range(8, 16))] * 3
    assert [batch.on_policy for batch in step] == [True, False, False, False, False, False]
    assert len({id(batch.step) for batch in step}) == 1
    assert watch.seen[6].step is not step[0].step


def test_later_passes_move_away_from_the_old_policy(tmp_path: Path) -> None:
    fit(tmp_path, loop={"mu": 3}, trainer={"max_epochs": 1})
    seen = scalars(tmp_path)
    (ratio,), (divergence,) = (of_updates(tmp_path, f"policy/{name}") for name in ("ratio_max", "kl_old"))
    assert ratio[0] == 1
    assert ratio[2] > ratio[1] > 1 + 1e-3
    assert divergence[2] > divergence[1] > divergence[0]
    # The run logs a point of the step: of maxima the largest, of all else the mean.
    assert seen["policy/ratio_max"] == {0: ratio[2]}
    assert seen["policy/kl_old"] == {0: pytest.approx(sum(divergence) / 3, rel=1e-6)}
    assert len(seen["policy/logp_gap"]) == 1
    assert max(seen["policy/logp_gap"].values()) < 1e-5


def test_gradient_norm_is_clipped_and_logged_before_clipping(tmp_path: Path) -> None:
    seen, clipped = Gradients(), Gradients()
    fit(tmp_path / "free", [seen], trainer={"max_epochs": 1})
    fit(tmp_path / "clipped", [clipped], trainer={"max_epochs": 1}, grad_clip=1e-3)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in seen.updates[0].values()))
    assert scalars(tmp_path / "clipped")["optim/grad_norm"][0] == pytest.approx(norm, rel=1e-5)
    scaled = {name: gradient * 1e-3 / norm for name, gradient in seen.updates[0].items()}
    assert relative(clipped.updates[0], scaled) < 1e-4


class Poison(L.Callback):
    """Makes one weight NaN for the updates of some steps, as a bad kernel or a cosmic ray would."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.healthy = torch.zeros(())

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.weight = pl_module.policy.model.lm_head.weight
        self.healthy = self.weight.detach().clone()
        if trainer.current_epoch in self.steps:
            self.weight.data[10] = torch.nan

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch in self.steps:
            assert torch.equal(self.weight.data.nan_to_num(), self.healthy.index_fill(0, torch.tensor([10]), 0.0))
            self.weight.data.copy_(self.healthy)


def test_an_update_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    # Two, of which neither follows the other.
    module = fit(tmp_path, [Poison(1, 3)], trainer={"max_epochs": 5}, max_bad_updates=2)
    assert module.policy.version == 3
    seen = scalars(tmp_path)
    assert seen["optim/bad_updates"] == {1: 1, 2: 1, 3: 2, 4: 2}
    assert math.isfinite(seen["optim/grad_norm"][4])


def test_a_stop_rule_hides_no_bad_update_and_only_those_made_are_counted(tmp_path: Path) -> None:
    fit(tmp_path, [Poison(1)], loop={"mu": 3, "stop": AfterOne()}, trainer={"max_epochs": 2})
    seen = scalars(tmp_path)
    assert seen["optim/bad_updates"] == {1: 3}
    assert seen["optim/updates"][1] == 0


class Seeing(Watcher, L.Callback):
    """Counts what it sees, and logs a number per update."""

    micro_batches = 0

    def see(self, micro_batch: MicroBatch) -> None:
        self.micro_batches += 1

    def metrics(self, reduce: Any) -> dict[str, Tensor]:
        return {"optim/seen": torch.tensor(float(self.micro_batches))}


def test_a_watching_callback_sees_each_micro_batch_and_adds_a_metric(tmp_path: Path) -> None:
    fit(tmp_path, [Seeing()], loop={"max_tokens": 0})
    assert scalars(tmp_path)["optim/seen"] == {0: 1, 1: 2, 2: 3}


def test_each_step_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    drawn: list[float] = []

    def note(sample: Sample, share: float) -> float:
        drawn.append(torch.rand(()).item())  # as a user's reward may
        return share

    fit(tmp_path, rewards=[Digits(change=note)])
    assert len(drawn) == 3 * 16 and len({*drawn[::16]}) == 3


def test_a_second_fit_keeps_the_reference_where_it_was(tmp_path: Path) -> None:
    module, trainer = made(tmp_path, trainer={"max_epochs": 1}, objective=Objective(beta=0.1))
    references: list[dict[str, Tensor]] = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, datamodule=TaskData(Echo()))
        references.append({name: value.clone() for name, value in module.reference.policy.state_dict().items()})
    assert module.policy.version == 2
    assert relative(references[1], references[0]) == 0 < relative(references[0], module.policy.state_dict())


class Syncs(PlainEngine):
    """Notes the versions that it is brought."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[int] = []

    def sync(self, policy: Policy) -> None:
        self.versions.append(policy.version)
        super().sync(policy)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_module_resumes_from_another_runs_checkpoint_without_its_past(tmp_path: Path) -> None:
    """The engine's weights, though of a version with the same number, and after a validation where its data stood."""
    trainer = {"max_epochs": 1}
    fit(tmp_path / "first", [StepCheckpoint()], trainer=trainer)
    first = tmp_path / "first" / "checkpoints" / "last.ckpt"
    module = fit(tmp_path / "own", trainer={"max_epochs": 2}, engine=Syncs())
    _, resumed = made(tmp_path / "resumed", [StepCheckpoint()], trainer=trainer | {"max_epochs": 2})
    resumed.fit(module, datamodule=TaskData(Echo()), ckpt_path=first)
    assert module.explorer.engine.versions == [0, 1, 1]
    look = Steps()
    module, validates = made(tmp_path / "anew", [look], trainer={"max_epochs": 1, "limit_val_batches": 1})
    validates.validate(module, datamodule=TaskData(Echo()), ckpt_path=first)
    validates.fit(module, datamodule=TaskData(Echo()))
    assert look.explorations[0].prompt_ids[0] == 0


def test_too_many_bad_updates_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"2 updates in a row .*max_bad_updates=2\. Lower the learning rate"):
        fit(tmp_path, [Poison(1, 2)], trainer={"max_epochs": 5}, max_bad_updates=2)


def test_every_pass_over_the_data_has_its_order_and_loses_no_question() -> None:
    def order() -> Shuffled:
        shuffled = Shuffled()
        shuffled.setup(Echo().questions("train"), seed=3)
        return shuffled

    drawn = order().next(range(72))
    passes = [drawn[first : first + 24] for first in (0, 24, 48)]
    assert order().next(range(30, 72)) == drawn[30:]
    # Runs of earlier versions go on in the order that they had.
    orders = [torch.randperm(24, generator=torch.Generator().manual_seed(3 * 1_000_003 + i)).tolist() for i in range(3)]
    assert passes == orders


class Fading(Digits):
    """Another status in the first `num_odd` steps."""

    def __init__(self, num_odd: int) -> None:
        super().__init__()
        self.num_odd = num_odd

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult(super().score(samples).value, ["odd" if self.num_odd > 0 else "ok"] * len(samples))

    def learn(self, *args: Any) -> dict[str, float]:
        self.num_odd -= 1
        return {}


def test_a_status_that_is_gone_has_rate_0_also_in_a_resumed_run(tmp_path: Path) -> None:
    for steps, num_odd in ((2, 1), (3, 0)):
        options: dict[str, Any] = {"trainer": {"max_epochs": steps}, "ckpt_path": "last" if steps == 3 else None}
        fit(tmp_path, [StepCheckpoint()], rewards=[Fading(num_odd)], **options)
    assert scalars(tmp_path)["reward/fading/odd"] == {0: 1, 1: 0, 2: 0}
