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
    metrics = scalars(tmp_path / "stopped")
    assert list(metrics["optim/updates"].values()) == [1, 1, 1]
    assert list(metrics["optim/stopped_by/KLAbove"].values()) == [1, 1, 1]
    # The second update of each step is refused: the logged point of a step is its first update.
    assert metrics["policy/kl_old"] == dict.fromkeys(range(3), 0.0)
    assert len(metrics["val/reward"]) == 4  # and one before the first step


def short_alone(sample: Sample, share: float) -> float:
    """Questions of more than five tokens are all the same to it."""
    return 0.5 if len(sample.prompt.token_ids) > 5 else share


def test_dynamic_sampling_continues_until_enough_groups_have_spread(tmp_path: Path) -> None:
    steps = Steps()
    loop = {"dynamic_sampling": DynamicSampling(), "num_minibatches": 2}
    fit(tmp_path, [steps], loop=loop, rewards=[Digits(change=short_alone)])
    metrics = scalars(tmp_path)
    for step, exploration in enumerate(steps.explorations):
        rollouts = exploration.rollouts
        assert len(rollouts) == 16 and len(rollouts.prompt_lengths) == 4
        samples = [exploration.samples[row] for row in rollouts.sample_index.tolist()]
        assert all(len(sample.prompt.token_ids) <= 5 for sample in samples)
        assert exploration.prompt_ids == sorted(exploration.prompt_ids)
        num_groups = len(exploration.samples) // 4
        assert num_groups >= 4
        assert metrics["rollout/groups_kept"][step] == pytest.approx(4 / num_groups)
        tokens = sum(len(sample.token_ids) for sample in exploration.samples)
        assert metrics["rollout/wasted"][step] == pytest.approx(1 - rollouts.num_tokens / tokens)
        # reward/ is about everything that was sampled.
        assert metrics["reward/mean"][step] == pytest.approx(sum(exploration.scores.total) / len(exploration.samples))
    assert max(metrics["rollout/rounds"].values()) > 1


def test_a_filter_reads_the_reward_that_is_learned_from() -> None:
    """A sample that another reward failed on does not count, and if all rewards have weight 0 the total decides."""
    results = {
        "watched": RewardResult([1.0, 2.0, 3.0, 3.0]),
        "right": RewardResult([1.0, 0.0, 0.0, 1.0]),
        "form": RewardResult([0.5, 0.5, 0.0, 1.0]),
    }
    samples = [Sample(prompt, "", [7], FinishReason.STOP) for prompt in prompts_of([3, 3]) for _ in range(2)]
    rollouts = Rollouts.from_lists([[1], [2]], [0, 0, 1, 1], [[7]] * 4)

    def passed(total: list[float], learned_from: list[str], reward: str | None = None) -> set[int]:
        scores = Scores(total, results, dict.fromkeys(learned_from, 1.0))
        return passing(HasSpread(reward), Exploration(samples, scores, rollouts, {}, 0))

    assert passed([0.0, 0.0, 0.5, 0.5], ["right", "form"]) == {10, 20}
    assert passed([math.nan, 0.0, 0.5, 0.5], ["right"]) == {20}
    assert passed([0.0, 1.0, 0.5, 0.5], []) == {10}
    assert passed([0.0, 0.0, 0.5, 0.5], ["right", "form"], "form") == {20}
    assert passed([0.0, 1.0, 0.5, 0.5], ["right"], "total") == {10}
