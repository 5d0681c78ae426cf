import math
from typing import Any

import pytest
import torch
from helpers.by_hand import by_hand
from helpers.contracts import needs
from helpers.tiny import rollouts_of
from torch import Tensor

from grpo_lightning.command.overview import optional
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import (
    Clipped,
    Reinforce,
    SurrogateResult,
)

OffPolicyMask: Any = optional("OffPolicyMask")
CISPO: Any = optional("CISPO")
SequenceClipped: Any = optional("SequenceClipped")


def with_advantage(advantage: Tensor) -> Rollouts:
    rollouts = rollouts_of([len(advantage)])
    rollouts.advantage = advantage
    return rollouts


def surrogate(logp: Tensor, old_logp: Tensor, advantage: Tensor, **kwargs) -> SurrogateResult:
    return Clipped(**kwargs)(logp, old_logp, with_advantage(advantage))


def grid() -> tuple[Tensor, Tensor]:
    """Ratios from 0.01 to 3.01 crossed with advantages of both signs and 0."""
    ratio = torch.linspace(0.01, 3.01, 151)
    advantage = torch.tensor([-3.0, -1.0, -0.01, 0.0, 0.01, 0.5, 2.0])
    pairs = torch.cartesian_prod(ratio, advantage)
    return pairs[:, 0], pairs[:, 1]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.4, 0.1)])
def test_gradient_is_ratio_times_advantage_and_exactly_zero_where_clipped(low, high):
    ratio, advantage = grid()
    logp = ratio.log().requires_grad_()
    result = surrogate(logp, torch.zeros_like(ratio), advantage, clip_low=low, clip_high=high)
    (gradient,) = torch.autograd.grad(result.value.sum(), logp)
    edge = ((ratio - (1 - low)).abs() < 1e-5) | ((ratio - (1 + high)).abs() < 1e-5)
    over, under = ratio > 1 + high, ratio < 1 - low
    clipped_high, clipped_low = over & (advantage > 0), under & (advantage < 0)
    assert ((result.clipped_high == clipped_high) | edge).all()
    assert ((result.clipped_low == clipped_low) | edge).all()
    held = clipped_high | clipped_low
    assert int((held & ~edge).sum()) > 100
    assert (gradient[held & ~edge] == 0).all()
    free = ~held & ~edge
    torch.testing.assert_close(gradient[free], (ratio * advantage)[free], rtol=1e-6, atol=1e-7)


# The other members


def test_reinforce_by_hand():
    # 2 log 0.05 and -1 log 0.2, whatever the ratios are.
    result, gradient = by_hand(Reinforce(), [1, 1], [2.0, -1.0], [0.5, 2.0])
    assert result.value.tolist() == pytest.approx([2 * math.log(0.05), -math.log(0.2)])
    assert gradient.tolist() == [2, -1]
    assert not (result.clipped_low | result.clipped_high | result.unreachable).any()


def test_without_bounds_nothing_is_clipped():
    result, gradient = by_hand(Clipped(None, None), [4], [2.0], [0.01, 0.5, 2.0, 9.0])
    assert result.value.tolist() == pytest.approx([0.02, 1, 4, 18])
    assert gradient.tolist() == pytest.approx([0.02, 1, 4, 18])
    assert not result.clipped_high.any()
    # Nor does a good token ever get to a bound.
    assert result.unreachable.all()
    result, gradient = by_hand(Clipped(None, 0.2), [4], [-1.0], [0.01, 0.5, 2.0, 9.0])
    assert gradient.tolist() == pytest.approx([-0.01, -0.5, -2, -9])
    assert not (result.clipped_low | result.unreachable).any()


def test_a_good_token_whose_bound_is_beyond_probability_one_is_unreachable():
    old = torch.tensor([0.9, 0.83, 0.84, 0.9, 0.9])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0])
    # 1 / 1.2 = 0.8333; only good tokens go up.
    result = surrogate(old.log(), old.log(), advantage)
    assert result.unreachable.tolist() == [True, False, True, False, False]
    assert surrogate(old.log(), old.log(), advantage, clip_high=0.1).unreachable.tolist() == [False] * 5


def test_dual_clip_by_hand():
    # c = 3 bounds what a bad token's ratio can cost: 4 Â becomes 3 Â, without gradient; 2 Â stays, and so do the good.
    result, gradient = by_hand(Clipped(0.2, 0.2, dual_clip=3), [3], [-1.0], [4.0, 2.0, 0.5])
    assert result.value.tolist() == pytest.approx([-3, -2, -0.8])
    assert gradient.tolist() == pytest.approx([0, -2, 0])
    assert result.clipped_high.tolist() == [True, False, False]
    assert result.clipped_low.tolist() == [False, False, True]
    result, gradient = by_hand(Clipped(0.2, 0.2, dual_clip=3), [3], [1.0], [4.0, 1.1, 0.5])
    assert result.value.tolist() == pytest.approx([1.2, 1.1, 0.5])
    assert gradient.tolist() == pytest.approx([0, 1.1, 0.5])
    # It goes with any bound above, and with none.
    result, _ = by_hand(Clipped(0.2, None, dual_clip=1.5), [2], [-1.0], [1.4, 1.6])
    assert result.value.tolist() == pytest.approx([-1.4, -1.5])
    assert not by_hand(Clipped(0.2, None, dual_clip=1.5), [2], [1.0], [1.4, 1.6])[0].clipped_high.any()


@needs(SequenceClipped)
def test_the_ratio_of_a_sequence_by_hand():
    # sqrt(2 * 0.5) = 1, so nothing is clipped though each token alone would be; sqrt(4 * 1) = 2 is.
    member = SequenceClipped(0.2, 0.2)
    result, gradient = by_hand(member, [2, 2], [1.0, 1.0], [2.0, 0.5, 4.0, 1.0])
    assert result.value.tolist() == pytest.approx([1, 1, 1.2, 1.2])
    assert gradient.tolist() == pytest.approx([1, 1, 0, 0])
    assert result.clipped_high.tolist() == [False, False, True, True]
    result, gradient = by_hand(member, [2, 2], [-1.0, -1.0], [0.5, 0.5, 2.0, 2.0])
    assert result.value.tolist() == pytest.approx([-0.8, -0.8, -2, -2])
    assert gradient.tolist() == pytest.approx([0, 0, -2, -2])
    assert result.clipped_low.tolist() == [True, True, False, False]
    # The bound of a sequence lies beyond probability 1 where sqrt(1/(0.9 * 0.9)) = 1.11 is under it.
    result, _ = by_hand(member, [2], [1.0], [1.0, 1.0], old=0.9)
    assert result.unreachable.all()
    # Of the sequence, not of its tokens: sqrt(1/(0.9 * 0.5)) = 1.49.
    rollouts = rollouts_of([2])
    rollouts.advantage, old_logp = torch.ones(2), torch.tensor([0.9, 0.5]).log()
    assert not member(old_logp, old_logp, rollouts).unreachable.any()


@needs(SequenceClipped)
def test_the_default_bounds_of_gspo_are_narrow():
    # Ratios 1.0003 and 1.0005, 0.9998 and 0.9996 of the default bounds 0.9997 and 1.0004.
    result, _ = by_hand(SequenceClipped(), [1, 1, 1, 1], [1.0, 1.0, -1.0, -1.0], [1.0003, 1.0005, 0.9998, 0.9996])
    assert result.clipped_high.tolist() == [False, True, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True]


@needs(CISPO)
def test_cispo_by_hand():
    # The factor is the ratio, at most 1 + 1 here; the token pushes on with it.
    result, gradient = by_hand(CISPO(clip_high=1.0), [2, 2], [1.0, -0.5], [1.5, 8.0, 0.1, 3.0])
    logp = [math.log(p) for p in (0.15, 0.8, 0.01, 0.3)]
    factor = [1.5, 2, -0.05, -1]
    assert result.value.tolist() == pytest.approx([f * p for f, p in zip(factor, logp, strict=True)])
    assert gradient.tolist() == pytest.approx(factor)
    assert result.clipped_high.tolist() == [False, True, False, False]
    # A lower bound lifts small ratios of good and of bad tokens alike.
    _, gradient = by_hand(CISPO(clip_low=0.5), [1, 1], [1.0, -1.0], [0.1, 0.1])
    assert gradient.tolist() == pytest.approx([0.5, -0.5])


@needs(OffPolicyMask)
def test_off_policy_mask_by_hand():
    # Mean log(π_old/π_θ): (log 2 + 0)/2 = 0.347 in the first, (log 2 - log 2)/2 = 0 in the second.
    ratio = [0.5, 1.0, 0.5, 2.0]
    member = OffPolicyMask(Clipped(None, None), threshold=0.3)
    result, gradient = by_hand(member, [2, 2], [-1.0, -1.0], ratio)
    assert result.value.tolist() == pytest.approx([0, 0, -0.5, -2])
    assert gradient.tolist() == pytest.approx([0, 0, -0.5, -2])
    # Masked tokens count as tokens at their bound.
    assert result.clipped_low.tolist() == [True, True, False, False]
    # A good completion stays, however far away, and so does any under a larger threshold.
    result, _ = by_hand(member, [2, 2], [1.0, 1.0], ratio)
    assert result.value.tolist() == pytest.approx(ratio)
    result, _ = by_hand(OffPolicyMask(Clipped(None, None), threshold=0.4), [2, 2], [-1.0, -1.0], ratio)
    assert result.value.tolist() == pytest.approx([-r for r in ratio])
