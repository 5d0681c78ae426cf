from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fitting import fit, scalars
from helpers.tiny import gradients, policy_of, rollouts_of, rows_of
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import HalfPrecision

from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.ragged import spread
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.weightings import BatchSize, SequenceMean
from grpo_lightning.policy.policy import Policy
from grpo_lightning.training import preparation
from grpo_lightning.training.packs import idle_pack, moving_rows
from grpo_lightning.training.step import Minibatch

LENGTHS = [4, 9, 1, 6, 2, 5, 3, 7]


def weighted(advantage: list[float]) -> Rollouts:
    """Eight completions of two prompts with the weights of the whole batch."""
    rollouts = rollouts_of(LENGTHS, prompt_lengths=[3, 5], group=[0, 0, 0, 0, 1, 1, 1, 1])
    rollouts.advantage = spread(torch.tensor(advantage), rollouts.lengths)
    batch = BatchSize(num_completions=8, num_groups=2, num_tokens=sum(LENGTHS))
    rollouts.weight = spread(SequenceMean()(rollouts.lengths, rollouts.group, batch), rollouts.lengths)
    rollouts.old_logp = None
    return rollouts


def without_idle_rows(rollouts: Rollouts) -> Rollouts:
    return rollouts.select(moving_rows(rollouts))


def backward(policy: Policy, packs: list[Rollouts], beta: float = 0.0) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    for pack in packs:
        scored = policy(pack)
        objective, _ = Objective(beta=beta)(scored.logp, scored.entropy, pack)
        objective.backward()
    return dict(gradients(policy))


def largest(gradient: dict[str, torch.Tensor]) -> float:
    return max(float(value.abs().max()) for value in gradient.values())


@pytest.mark.parametrize(
    ("advantage", "kept"),
    [
        ([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 1]),
        ([0.0, 0.0, 0.0, 0.0, -0.5, 0.0, 1.5, -1.0], [4, 6, 7]),
        ([0.1, 0.2, 0.3, -0.6, 1.0, -1.0, 2.0, -2.0], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_leaving_out_idle_rows_keeps_the_gradient(policy, advantage, kept):
    rollouts = weighted(advantage)
    active = without_idle_rows(rollouts)
    assert active.row.tolist() == kept
    # Their weights stay those of the whole batch.
    before = rows_of(rollouts)
    assert rows_of(active) == [before[row] for row in kept]
    whole = backward(policy, [rollouts])
    assert largest(whole) > 0.01
    for name, gradient in backward(policy, [active]).items():
        torch.testing.assert_close(gradient, whole[name], atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_one_row_stays_if_all_are_idle_and_its_gradient_is_zero():
    policy = policy_of()
    active = without_idle_rows(weighted([0.0] * 8))
    assert active.row.tolist() == [0]
    gradient = backward(policy, [active])
    assert largest(gradient) == 0
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_a_row_whose_tokens_of_advantage_are_all_masked_is_idle():
    # Both rows of advantage lose weight: the first all of it, the fifth that of one token.
    rollouts = weighted([1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0])
    rollouts.weight[:4] = 0
    rollouts.weight[sum(LENGTHS[:4])] = 0
    assert without_idle_rows(rollouts).row.tolist() == [4]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_an_idle_pack_adds_nothing(policy, beta):
    rollouts = weighted([1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 0.5, -0.5])
    packs = rollouts.packs(max_tokens=40)
    idle = idle_pack(rollouts.temperature)
    assert largest(backward(policy, [idle], beta)) == 0
    without = backward(policy, packs, beta)
    assert largest(without) > 0.01
    for name, gradient in backward(policy, [*packs, idle], beta).items():
        assert gradient.equal(without[name])


def test_lightning_hands_on_the_very_packs_the_loop_made() -> None:
    # Each notes its log-probs in the first pass for the others.
    packs = weighted([1.0] * 8).packs(max_tokens=40)
    minibatch = Minibatch(packs, True, object())  # type: ignore[arg-type]
    assert move_data_to_device(minibatch, torch.device("meta")) is minibatch
    assert HalfPrecision("bf16-true").convert_input(minibatch) is minibatch
    assert packs[0].advantage.dtype == torch.float32


def test_idle_packs_change_nothing_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"loop": {"mu": 2, "max_tokens": 40}, "objective": Objective(beta=0.1)}
    fit(tmp_path / "without", **options)
    monkeypatch.setattr(preparation, "most", lambda count: count + 1)
    fit(tmp_path / "with", **options)
    assert scalars(tmp_path / "with") == scalars(tmp_path / "without")
