"""Sources of rollouts: today's, and one outside the package whose rollouts are a step late."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fitting import fit, scalars
from torch import Tensor

from grpo_lightning import Exploration, Minibatch, Objective, Synchronous


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
            self.seen.append((batch, [pl_module.policy(pack.rollouts).logp for pack in batch.packs]))


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
            assert pack.rollouts.sampler_logp is not None
            ratios.append((logp - pack.rollouts.sampler_logp).exp())
        ratio = torch.cat(ratios)
        assert float((ratio - 1).abs().max()) > 1e-3
        assert seen["policy/ratio_mean"][update] == pytest.approx(float(ratio.mean()), rel=1e-5)
        assert seen["policy/ratio_max"][update] == pytest.approx(float(ratio.max()), rel=1e-5)
    # The gap to the sampler tells only of rollouts that are on policy.
    assert len(seen["policy/logp_gap"]) == 1
