"""Methods of other papers, each by numbers worked out by hand."""

import math

import pytest
import torch
from helpers.by_hand import by_hand
from helpers.reward_batches import of

from grpo_lightning.plugins.methods.advantages.maxrl import MaxRL
from grpo_lightning.plugins.methods.penalties.adaptive_entropy import AdaptiveEntropy
from grpo_lightning.plugins.methods.surrogates.dppo import DPPO
from grpo_lightning.plugins.methods.surrogates.gmpo import GMPO
from grpo_lightning.plugins.methods.surrogates.vespo import VESPO


def test_maxrl_by_hand():
    # Means 1/4 and 1: (1 - 1/4) / (1/4) = 3, -1; (2 - 1) / 1 and -1.
    assert of(MaxRL(), [1, 0, 0, 0, 2, 0], [0, 0, 0, 0, 1, 1]) == [3, -1, -1, -1, 1, -1]
    # Nobody right, everybody right, means that are not above 0, a failure.
    assert of(MaxRL(), [0, 0, 1, 1, 1, -1, 1, 0, math.nan], [0, 0, 1, 1, 2, 2, 3, 3, 3]) == [0] * 6 + [1, -1, 0]
    assert of(MaxRL(), [-1, -3]) == [0, 0]


def test_dppo_by_total_variation_by_hand():
    # Good tokens: 0.1 -> 0.29 and 0.31, 0.9 -> 0.99: only the second has moved more than 0.2, and no ratio decides.
    # From 0.78 on there are 0.22 left.
    ratio, old, member = [2.9, 3.1, 1.1, 1.0], [0.1, 0.1, 0.9, 0.78], DPPO(low=0.25)
    result, gradient = by_hand(member, [1] * 4, [1.0] * 4, ratio, old)
    assert gradient.tolist() == pytest.approx([2.9, 0, 1.1, 1.0])
    assert result.clipped_high.tolist() == [False, True, False, False]
    assert result.unreachable.tolist() == [False, False, True, False]
    # Bad: 0.9 -> 0.63 is left alone, though a ratio of 0.7 is hardly far; 0.1 -> 0.01 pushes on. Up again is free.
    # 0.9 -> 0.68 is under the bound of bad tokens, and would be over that of good ones.
    result, gradient = by_hand(member, [1] * 4, [-1.0] * 4, [0.7, 0.1, 5.0, 0.75], [0.9, 0.1, 0.1, 0.9])
    assert gradient.tolist() == pytest.approx([0, -0.1, -5.0, -0.75])
    assert result.clipped_low.tolist() == [True, False, False, False]
    # Truncated: 0.01 -> 0.3 in steps that may not count more than 4 times.
    _, gradient = by_hand(DPPO(high=0.5, cap=4.0), [1], [2.0], [30.0], 0.01)
    assert gradient.tolist() == [8.0]


def test_dppo_by_kl_by_hand():
    # KL of 0.5 to 0.8 over two events: (log(5/8) + log(5/2)) / 2 = 0.223144; of 0.5 to 0.6: 0.020411.
    member = DPPO("kl", low=0.1, high=0.1)
    logp = torch.tensor([0.8, 0.6]).log()
    expected = [(math.log(5 / 8) + math.log(5 / 2)) / 2, (math.log(5 / 6) + math.log(5 / 4)) / 2]
    assert member.distance(logp, torch.tensor([0.5, 0.5]).log()).tolist() == pytest.approx(expected, rel=1e-5)
    result, gradient = by_hand(member, [1, 1], [1.0, 1.0], [1.6, 1.2], 0.5)
    assert gradient.tolist() == pytest.approx([0, 1.2])
    assert result.clipped_high.tolist() == [True, False]


def test_gmpo_by_hand():
    # Bounds e^∓0.4. Good: ratios 4 and 1 count as e^0.4 and 1, whose root is e^0.2 = 1.221403; the second alone still
    # pushes. Below, 0.25 and 1 have the root 0.5, and both push.
    result, gradient = by_hand(GMPO(), [2, 2], [1.0, 1.0], [4.0, 1.0, 0.25, 1.0])
    assert result.value.tolist() == pytest.approx([1.2214028, 1.2214028, 0.5, 0.5])
    assert gradient.tolist() == pytest.approx([0, 1.2214028, 0.5, 0.5])
    assert result.clipped_high.tolist() == [True, False, False, False]
    # Bad: 0.25 counts as e^-0.4, so the root is e^-0.2 = 0.818731; 4 stays.
    result, gradient = by_hand(GMPO(), [2, 2], [-1.0, -1.0], [0.25, 1.0, 4.0, 1.0])
    assert result.value.tolist() == pytest.approx([-0.8187308, -0.8187308, -2, -2])
    assert gradient.tolist() == pytest.approx([0, -0.8187308, -2, -2])
    assert result.clipped_low.tolist() == [True, False, False, False]
    result, _ = by_hand(GMPO(), [1], [1.0], [1.0], old=0.7)  # e^0.4 * 0.7 = 1.04
    assert result.unreachable.all()
    assert not by_hand(GMPO(), [1], [-1.0], [1.0], old=0.7)[0].unreachable.any()


def test_vespo_weighs_a_completion_far_below_as_one_at_a_hundred_millionth():
    # W of 1e-8 and of 1e-30, each in two tokens of a good completion: W^2 e^(3 (1 - W)), and never less.
    _, gradient = by_hand(VESPO(), [2, 2], [1.0, 1.0], [1e-4, 1e-4, 1e-15, 1e-15])
    assert gradient.tolist() == pytest.approx([1e-16 * math.exp(3)] * 4, rel=1e-4, abs=0)


def test_adaptive_entropy_by_hand():
    bonus = AdaptiveEntropy(target=0.5, delta=0.1, largest=0.25)
    coefficients = [bonus.coefficient]
    for entropy in (0.6, 0.5, 0.4, 0.4, 0.6, 0.4):
        bonus.observe(entropy)
        coefficients.append(bonus.coefficient)
    # Not below 0 nor over 0.25; off while the entropy is above the target, where c falls to 0.15.
    assert coefficients == pytest.approx([0, 0, 0.1, 0.2, 0.25, 0, 0.25])
