"""Sources of rollouts: today's, and one outside the package whose rollouts are a step late."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.command import Grpo
from helpers.fitting import fit, scalars
from torch import Tensor

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.objective import Objective
from grpo_lightning.training.callbacks.checkpoint import StepCheckpoint
from grpo_lightning.training.explorer import Exploration
from grpo_lightning.training.loop import GRPOLoop
from grpo_lightning.training.observer import Observer
from grpo_lightning.training.source import RolloutSource, Synchronous
from grpo_lightning.training.step import Minibatch
from grpo_lightning.types import UsageError


class OneStepLate(Synchronous):
    """Hands out what was sampled a step before, while the next step's rollouts are sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: Exploration | None = None

    def next(self, step: int) -> Exploration:
        ready = self.waiting or super().next(step)
        self.waiting = super().next(step + 1)
        return ready


class Updates(L.Callback):
    """Every minibatch before its update, with the policy's own log-probs of its packs."""

    def __init__(self) -> None:
        self.seen: list[tuple[Minibatch, list[Tensor]]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Minibatch, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen.append((batch, [pl_module.policy(pack).logp for pack in batch.packs]))


def test_ratios_of_late_rollouts_are_against_their_sampler(tmp_path: Path) -> None:
    updates = Updates()
    fit(tmp_path, [updates], loop={"source": OneStepLate()}, trainer={"max_epochs": 4}, objective=Objective(beta=0.01))
    # The first rollouts are of the policy as it is; each of the others is a step behind.
    assert [batch.on_policy for batch, _ in updates.seen] == [True, False, False, False]
    assert [batch.step.exploration.policy_version for batch, _ in updates.seen] == [0, 0, 1, 2]
    seen = scalars(tmp_path)
    assert seen["policy/ratio_max"][0] == 1
    for update, (batch, logps) in enumerate(updates.seen[1:], start=1):
        ratios = []
        for pack, logp in zip(batch.packs, logps, strict=True):
            assert pack.sampler_logp is not None
            ratios.append((logp - pack.sampler_logp).exp())
        ratio = torch.cat(ratios)
        assert float((ratio - 1).abs().max()) > 1e-3
        assert seen["policy/ratio_mean"][update] == pytest.approx(float(ratio.mean()), rel=1e-5)
        assert seen["policy/ratio_max"][update] == pytest.approx(float(ratio.max()), rel=1e-5)
    # The gap to the sampler tells only of rollouts that are on policy.
    assert len(seen["policy/logp_gap"]) == 1


def test_a_policy_learns_from_late_rollouts(tmp_path: Path) -> None:
    fit(
        tmp_path,
        loop={"group_size": 8, "prompts_per_step": 8, "mu": 2, "source": OneStepLate()},
        trainer={"max_epochs": 30},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )
    reward = list(scalars(tmp_path)["reward/mean"].values())
    assert reward[0] < 0.35 < 0.9 < reward[-1]


def test_a_skipped_update_leaves_the_version(tmp_path: Path) -> None:
    class Poison(L.Callback):
        """Makes the first update of the first step NaN."""

        def on_before_optimizer_step(self, *args: Any) -> None:
            raise AssertionError("the update was made")

        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Minibatch, batch_idx: int) -> None:
            for pack in batch.packs:
                pack.weight = pack.weight * torch.nan

    module = fit(tmp_path, [Poison()], trainer={"max_epochs": 2})
    assert module.policy.version == 0
    assert scalars(tmp_path)["optim/bad_updates"] == {0: 1, 1: 2}


class Told(Observer):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, float]] = []

    def exploring(self, num_completions: int) -> None:
        self.notes.append(("exploring", num_completions))

    def explored(self, num_completions: int) -> None:
        self.notes.append(("explored", num_completions))

    def rewarded(self, mean: float) -> None:
        self.notes.append(("rewarded", mean))

    def reported(self, metrics: Mapping[str, float]) -> None:
        self.notes.append(("reported", metrics["reward/mean"]))


class Watching(L.Callback):
    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        GRPOLoop.find(trainer).observers.append(self.observer)


def test_observers_are_told_how_a_step_goes(tmp_path: Path) -> None:
    told = Told()
    fit(tmp_path, [Watching(told)], trainer={"max_epochs": 1})
    first, *explored, rewarded, reported = told.notes
    assert first == ("exploring", 16)
    assert {name for name, _ in explored} == {"explored"} and sum(count for _, count in explored) == 16
    mean = pytest.approx(scalars(tmp_path)["reward/mean"][0])
    assert (rewarded, reported) == (("rewarded", mean), ("reported", mean))


class Fixed(RolloutSource):
    """Samples once, and hands the same rollouts out at every step."""

    def __init__(self) -> None:
        self.sampler = Synchronous()
        self.exploration: Exploration | None = None

    def next(self, step: int) -> Exploration:
        self.sampler.setup(self.inputs)
        self.exploration = self.exploration or self.sampler.next(0)
        self.exploration.metrics = {"rollout/age": float(step)}
        return self.exploration


def test_a_source_logs_numbers_of_its_own(tmp_path: Path) -> None:
    fit(tmp_path, loop={"source": Fixed()})
    seen = scalars(tmp_path)
    assert list(seen["rollout/age"].values()) == [0, 1, 2]
    assert len({*seen["rollout/tokens"].values()}) == 1


def test_a_source_outside_the_package_is_named_on_the_command_line(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("late.py").write_text(
        "from grpo_lightning import Exploration, Synchronous\n\n\n"
        "class OneStepLate(Synchronous):\n"
        "    waiting = None\n\n"
        "    def next(self, step: int) -> Exploration:\n"
        "        ready = self.waiting or super().next(step)\n"
        "        self.waiting = super().next(step + 1)\n"
        "        return ready\n"
    )
    code, _, errors = grpo("fit", "--loop.source=late.OneStepLate")
    assert code == 0, errors
    assert "late.OneStepLate" in Path("run/config.yaml").read_text()


class Versions(L.Callback):
    """The policy's version and the source's first question at the beginning of each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.drawn: list[int] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.seen.append(pl_module.policy.version)
        self.drawn.append(GRPOLoop.find(trainer).source.state_dict()["drawn"])


def test_a_resumed_run_goes_on_with_the_version(tmp_path: Path) -> None:
    whole, resumed = Versions(), Versions()
    saving = {"enable_checkpointing": True}
    fit(tmp_path / "whole", [whole], loop={"mu": 2}, trainer={"max_epochs": 3})
    fit(tmp_path / "cut", [StepCheckpoint()], loop={"mu": 2}, trainer={"max_epochs": 2} | saving)
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    fit(tmp_path / "cut", [resumed, StepCheckpoint()], {"mu": 2}, {"max_epochs": 3} | saving, ckpt_path=last)
    assert whole.seen == [0, 2, 4]
    assert resumed.seen == [4]
    assert resumed.drawn == whole.drawn[2:]


def test_filters_are_refused_for_late_rollouts(tmp_path: Path) -> None:
    sampling = Sampling(max_new_tokens=6, top_k=5)
    with pytest.raises(UsageError, match=r"model\.sampling: set top_k=0, top_p=1 and min_p=0"):
        fit(tmp_path, loop={"source": OneStepLate()}, trainer={"max_epochs": 3}, sampling=sampling)
