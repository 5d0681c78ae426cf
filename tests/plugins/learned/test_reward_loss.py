"""Losses of the reward model by hand: scores 0.5, -1, 2 of one prompt, 0.25 and -0.5 of another."""

import math

import pytest
import torch

from grpo_lightning.plugins.learned.loss import (
    BinaryCrossEntropy,
    BradleyTerry,
    LabelledBatchSize,
    RewardLoss,
    SumOf,
    pairs,
)

SCORE = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.5])
LABEL = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
GROUP = torch.tensor([7, 7, 7, 3, 3])
SIZE = LabelledBatchSize(num_completions=5, num_contested=1)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_pairs_of_a_prompt_have_weight_1_together():
    better, worse, weight = pairs(LABEL, GROUP)
    assert (better.tolist(), worse.tolist(), weight.tolist()) == ([0, 0], [1, 2], [0.5, 0.5])
    better, worse, weight = pairs(torch.tensor([0.5, 1.0, 0.0]), torch.zeros(3))
    assert sorted(zip(better.tolist(), worse.tolist(), strict=True)) == [(0, 2), (1, 0), (1, 2)]
    torch.testing.assert_close(weight, torch.full((3,), 1 / 3))


def test_binary_cross_entropy_is_the_mean_over_completions():
    expected = (softplus(-0.5) + softplus(-1.0) + softplus(2.0) + softplus(-0.25) + softplus(0.5)) / 5
    assert float(BinaryCrossEntropy()(SCORE, LABEL, GROUP, SIZE)) == pytest.approx(expected, rel=1e-6)


def test_bradley_terry_is_the_mean_over_pairs_then_prompts():
    # Pairs: 0.5 over -1, and 0.5 over 2.
    expected = (softplus(-1.5) + softplus(1.5)) / 2
    assert float(BradleyTerry(center=0.0)(SCORE, LABEL, GROUP, SIZE)) == pytest.approx(expected, rel=1e-6)
    expected += 0.1 * ((0.5 - 1) ** 2 + (0.5 + 2) ** 2) / 2
    assert float(BradleyTerry(0.1)(SCORE, LABEL, GROUP, SIZE)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), BradleyTerry(0.1)])
def test_parts_add_up_to_the_batch(loss: RewardLoss):
    label = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    size = LabelledBatchSize(5, 2)
    whole = loss(SCORE, label, GROUP, size)
    parts = [loss(SCORE[rows], label[rows], GROUP[rows], size) for rows in (slice(0, 3), slice(3, 5))]
    torch.testing.assert_close(whole, parts[0] + parts[1])


def test_a_sum():
    both = SumOf([BinaryCrossEntropy(), BradleyTerry()])
    expected = BinaryCrossEntropy()(SCORE, LABEL, GROUP, SIZE) + BradleyTerry()(SCORE, LABEL, GROUP, SIZE)
    torch.testing.assert_close(both(SCORE, LABEL, GROUP, SIZE), expected)


def test_without_pairs_bradley_terry_is_0_and_has_a_gradient():
    score = SCORE[3:].clone().requires_grad_()
    loss = BradleyTerry()(score, LABEL[3:], GROUP[3:], LabelledBatchSize(2, 0))
    loss.backward()
    assert float(loss.detach()) == 0 and score.grad is not None and score.grad.tolist() == [0, 0]
