"""DeepSeekMath's Algorithm 1 as printed, line by line, and what may be put in its places."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fitting import Digits, Steps, fit, scalars
from helpers.tiny import prompts_of
from torch import Tensor

from grpo_lightning import Exploration, GroupStd, KLAbove, Objective, Policy, RewardResult, Rollouts, Scores
from grpo_lightning.grpo.source import passing
from grpo_lightning.maths.filters import DynamicSampling, HasSpread
from grpo_lightning.policy.snapshots import FrozenCopy, RecordedLogp
from grpo_lightning.types import FinishReason, Sample

log: list[str] = []


class Reference(FrozenCopy):
    def refresh(self, policy: Policy) -> None:
        super().refresh(policy)
        log.append("3 reference")


class Old(RecordedLogp):
    def refresh(self, policy: Policy) -> None:
        log.append("6 old policy")


class Learning(Digits):
    """Counts what it is shown."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        log.append("8 rewards")
        return super().score(samples)

    def learn(self, samples: Sequence[Sample], scores: Scores, iteration_ends: bool) -> dict[str, float]:
        assert len(samples) == len(scores.total) == 16
        log.append("12 reward model" if iteration_ends else "replay")
        return {"seen": float(len(samples)) * (1 + iteration_ends)}


class Mean(GroupStd):
    def estimate(self, reward: Tensor, group: Tensor, num_groups: int) -> Tensor:
        log.append("9 advantages")
        return super().estimate(reward, group, num_groups)


class Step(L.Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        log.append("11 update")


def test_the_order_of_its_lines(tmp_path: Path) -> None:
    log.clear()
    fit(
        tmp_path,
        [Step()],
        loop={"mu": 2, "steps_per_iteration": 2},
        rewards=[Learning()],
        advantage=Mean(),
        old_policy=Old(),
        reference=Reference(),
        objective=Objective(beta=0.1),
    )
    # Once before the first step, where the weights are read.
    assert log[:2] == ["6 old policy", "3 reference"]
    step = ["6 old policy", "8 rewards", "9 advantages", "11 update", "11 update"]
    assert log[2:] == ["3 reference", *step, "replay", *step, "12 reward model", "3 reference", *step, "replay"]
    assert list(scalars(tmp_path)["reward/learning/seen"].values()) == [16, 32, 16]


class Weights(L.Callback):
    """The policy's weights after each step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps.append(torch.cat([p.detach().flatten().clone() for p in pl_module.policy.parameters()]))


def test_updates_after_a_stop_rule_change_nothing(tmp_path: Path) -> None:
    stopped, single = Weights(), Weights()
    fit(tmp_path / "stopped", [stopped], loop={"mu": 4, "stop": KLAbove(1e-12)}, trainer={"limit_val_batches": 1})
    fit(tmp_path / "single", [single])
    for ours, theirs in zip(stopped.steps, single.steps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    found = scalars(tmp_path / "stopped")
    assert list(found["optim/updates"].values()) == [1, 1, 1]
    assert list(found["optim/stopped_by/KLAbove"].values()) == [1, 1, 1]
    # The second update of each step is looked at and refused: the point of a step is the first alone.
    assert found["policy/kl_old"] == dict.fromkeys(range(3), 0.0)
    assert len(found["val/reward"]) == 4  # and one before the first step


def short_alone(sample: Sample, share: float) -> float:
    """Questions of more than five tokens are all the same to it."""
    return 0.5 if len(sample.prompt.token_ids) > 5 else share


def test_dynamic_sampling_draws_until_enough_groups_have_spread(tmp_path: Path) -> None:
    look = Steps()
    loop = {"dynamic_sampling": DynamicSampling(), "num_minibatches": 2}
    fit(tmp_path, [look], loop=loop, rewards=[Digits(change=short_alone)])
    found = scalars(tmp_path)
    for number, exploration in enumerate(look.explorations):
        rollouts = exploration.rollouts
        assert len(rollouts) == 16 and len(rollouts.prompt_lengths) == 4
        kept = [exploration.samples[row] for row in rollouts.row.tolist()]
        assert all(len(sample.prompt.token_ids) <= 5 for sample in kept)
        places = [sample.prompt.id for sample in kept]
        assert places == sorted(places)
        drawn = len(exploration.samples) // 4
        assert drawn >= 4
        step = sorted(found["rollout/rounds"])[number]
        assert found["rollout/groups_kept"][step] == pytest.approx(4 / drawn)
        tokens = sum(len(sample.token_ids) for sample in exploration.samples)
        assert found["rollout/wasted"][step] == pytest.approx(1 - rollouts.num_tokens / tokens)
        # reward/ is about everything that was sampled.
        assert found["reward/mean"][step] == pytest.approx(sum(exploration.scores.total) / len(exploration.samples))
    assert max(found["rollout/rounds"].values()) > 1


class Form(Digits):
    """Differs in groups that `Easy` finds all the same."""


@pytest.mark.parametrize(
    ("reward", "looks_at"),
    [(None, "correctness"), ("form", "total")],
)
def test_groups_must_differ_in_correctness_not_in_form(tmp_path: Path, reward: str | None, looks_at: str) -> None:
    """Questions of more than five tokens have all the same correctness, and by their form totals that differ."""
    look = Steps()
    rewards = [
        Form(weight=0, name="watched"),
        Digits(name="correctness", change=short_alone),
        Form(weight=0.1, name="form"),
    ]
    dynamic = DynamicSampling(filter=HasSpread(reward))
    fit(tmp_path, [look], loop={"dynamic_sampling": dynamic}, rewards=rewards)
    kept = [e.samples[row] for e in look.explorations for row in e.rollouts.row.tolist()]
    longest = max(len(sample.prompt.token_ids) for sample in kept)
    assert longest <= 5 if looks_at == "correctness" else longest > 5
    assert max(scalars(tmp_path)["rollout/rounds"].values()) == 1 or looks_at == "correctness"


def test_a_filter_looks_at_what_is_learned_from() -> None:
    """A sample that another reward failed on does not count, and with nothing but watched rewards the total is all."""
    results = {"right": RewardResult([1.0, 0.0, 0.0, 1.0], ["ok"] * 4)}
    samples = [Sample(prompt, "", [7], FinishReason.STOP) for prompt in prompts_of([3, 3]) for _ in range(2)]
    rollouts = Rollouts.from_lists([[1], [2]], [0, 0, 1, 1], [[7]] * 4)

    def passed(total: list[float], learned_from: list[str]) -> set[int]:
        scores = Scores(total, results, dict.fromkeys(learned_from, 1.0))
        return passing(HasSpread(), Exploration(samples, scores, rollouts, {}, 0))

    assert passed([0.0, 0.0, 0.5, 0.5], ["right"]) == {10, 20}
    assert passed([math.nan, 0.0, 0.5, 0.5], ["right"]) == {20}
    assert passed([0.0, 1.0, 0.5, 0.5], []) == {10}
