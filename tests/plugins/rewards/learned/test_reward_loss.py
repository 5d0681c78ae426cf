"""Losses of the reward model, and its agreement with the verifier, by hand."""

import math

import pytest
import torch

from grpo_lightning.plugins.rewards.learned.pairwise_loss import (
    BinaryCrossEntropy,
    BradleyTerry,
    LabelledBatchSize,
    RewardLoss,
    SumOf,
    agreement,
    pairs,
    pairwise,
)

# Scores 0.5, -1, 2 of one prompt, 0.25 and -0.5 of another.
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


# Agreement

TWO = ([0.9, 0.2, 0.6, 0.4, 0.4, 0.7], [1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1], [1, 2, 3, 4, 5, 7])


def agreed(probability: list[float], label: list[float], group: list[int], length: list[int]) -> dict[str, float]:
    columns = (torch.tensor(column, dtype=torch.float64) for column in (probability, label))
    return agreement(*columns, torch.tensor(group), torch.tensor(length, dtype=torch.float64))


def test_agreement_by_hand():
    found = agreed(*TWO)
    # The first prompt: 0.9 over 0.2 and 0.6, both right. The second: 0.4 against 0.4 (half) and 0.7 (wrong).
    assert found["pairwise"] == pytest.approx((1 + 0.25) / 2)
    # 0.9 beats 0.2, 0.6, 0.4, 0.7; 0.4 beats 0.2, ties 0.4, loses to 0.6 and 0.7: 5.5 of 8.
    assert found["auc"] == pytest.approx(5.5 / 8)
    assert found["brier"] == pytest.approx(sum(e * e for e in (0.1, 0.2, 0.6, 0.6, 0.4, 0.7)) / 6)
    # Bins of width 0.1: {0.9: right}, {0.2}, {0.6}, {0.4: one of two right}, {0.7}.
    assert found["ece"] == pytest.approx((0.1 + 0.2 + 0.6 + 2 * abs(0.4 - 0.5) + 0.7) / 6, abs=1e-6)
    # Less their means 8/15 and 11/3, times 30 and 3: of the probability, and of the length.
    r, v = [11, -10, 2, -4, -4, 5], [-8, -5, -2, 1, 4, 10]
    expected = sum(a * b for a, b in zip(r, v, strict=True)) / math.sqrt(sum(a * a for a in r) * sum(b * b for b in v))
    assert found["length_correlation"] == pytest.approx(expected, abs=1e-6)
    assert [found["verified"], found["overrated"]] == pytest.approx([2 / 6, (3.2 - 2) / 6])


def test_what_is_undefined_is_nan():
    right = agreed([0.9, 0.2], [1, 1], [0, 0], [1, 1])
    assert all(math.isnan(right[name]) for name in ("pairwise", "auc", "length_correlation"))
    same = agreed([0.5, 0.5], [1, 0], [0, 0], [1, 2])
    assert math.isnan(same["length_correlation"]) and same["pairwise"] == 0.5


def test_large_scores_keep_their_order():
    score = torch.tensor([20.0, 19.0], dtype=torch.float64)
    assert pairwise(score.sigmoid(), torch.tensor([1.0, 0.0]), torch.tensor([0, 0])) == 1
