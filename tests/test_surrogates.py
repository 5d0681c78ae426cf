import math

import pytest
import torch
from tiny import rollouts_of
from torch import Tensor

from grpo_lightning.rollouts import Rollouts
from grpo_lightning.surrogates import Clipped, SurrogateResult
from grpo_lightning.types import UsageError

# Worked examples of the write-up this project follows: π_old, Â, then rows of π_θ, ratio, clipped ratio and
# clipped objective. The clipped ratio is min(ratio, clip(ratio)) for Â > 0 and max(...) for Â < 0.
EXAMPLES = {
    "example 1": (
        0.010,
        1.0,
        [
            (0.008, 0.800, 0.800, 0.800),
            (0.010, 1.000, 1.000, 1.000),
            (0.012, 1.200, 1.200, 1.200),
            (0.100, 10.000, 1.200, 1.200),
            (0.500, 50.000, 1.200, 1.200),
        ],
    ),
    "example 2": (
        0.900,
        1.0,
        [
            (0.800, 0.889, 0.889, 0.889),
            (0.900, 1.000, 1.000, 1.000),
            (0.950, 1.056, 1.056, 1.056),
            (1.000, 1.111, 1.111, 1.111),
        ],
    ),
    "example 3": (
        0.900,
        -1.0,
        [
            (0.900, 1.000, 1.000, -1.000),
            (0.800, 0.889, 0.889, -0.889),
            (0.720, 0.800, 0.800, -0.800),
            (0.500, 0.556, 0.800, -0.800),
            (0.100, 0.111, 0.800, -0.800),
        ],
    ),
}


def with_advantage(advantage: Tensor) -> Rollouts:
    rollouts = rollouts_of([len(advantage)])
    rollouts.advantage = advantage
    return rollouts


def surrogate(logp: Tensor, old_logp: Tensor, advantage: Tensor, **kwargs) -> SurrogateResult:
    return Clipped(**kwargs)(logp, old_logp, with_advantage(advantage))


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(name):
    old, advantage, rows = EXAMPLES[name]
    theta, ratio, clipped_ratio, objective = torch.tensor(rows).T
    result = surrogate(theta.log(), torch.full_like(theta, old).log(), torch.full_like(theta, advantage))
    # Three digits are printed.
    torch.testing.assert_close(result.value, objective, atol=5.01e-4, rtol=0)
    torch.testing.assert_close(result.value / advantage, clipped_ratio, atol=5.01e-4, rtol=0)
    # A token counts as held where the two ratios of the table differ, and on the side its advantage pulls to.
    held = ratio != clipped_ratio
    assert result.clipped_high.tolist() == (held & (advantage > 0)).tolist()
    assert result.clipped_low.tolist() == (held & (advantage < 0)).tolist()


def grid() -> tuple[Tensor, Tensor]:
    """Ratios from 0.01 to 3.01 crossed with advantages of both signs and 0."""
    ratio = torch.linspace(0.01, 3.01, 151)
    advantage = torch.tensor([-3.0, -1.0, -0.01, 0.0, 0.01, 0.5, 2.0])
    pairs = torch.cartesian_prod(ratio, advantage)
    return pairs[:, 0], pairs[:, 1]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.4, 0.1), (0.0, 0.0), (1.0, 5.0)])
def test_equals_the_case_form_of_eq_30(low, high):
    ratio, advantage = grid()
    result = surrogate(ratio.log(), torch.zeros_like(ratio), advantage, clip_low=low, clip_high=high)
    for r, a, value in zip(ratio.tolist(), advantage.tolist(), result.value.tolist(), strict=True):
        g = (1 + high) * a if a >= 0 else (1 - low) * a
        assert value == pytest.approx(min(r * a, g), abs=1e-6)


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


def test_the_bounds_are_not_symmetric():
    ratio = torch.tensor([1.25, 1.35, 0.85, 0.75])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    result = surrogate(ratio.log(), torch.zeros(4), advantage, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(result.value, torch.tensor([1.25, 1.28, -0.85, -0.80]))
    assert result.clipped_high.tolist() == [False, True, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True]


def test_a_good_token_below_and_a_bad_token_above_the_bounds_are_not_clipped():
    ratio, advantage = torch.tensor([0.5, 3.0]), torch.tensor([1.0, -1.0])
    logp = ratio.log().requires_grad_()
    result = surrogate(logp, torch.zeros(2), advantage)
    (gradient,) = torch.autograd.grad(result.value.sum(), logp)
    torch.testing.assert_close(gradient, torch.tensor([0.5, -3.0]))
    assert not (result.clipped_low | result.clipped_high).any()


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_values_and_gradients_stay_finite_at_absurd_ratios(advantage):
    logp = torch.tensor([-1e4, -500.0, -100.0, 0.0, 0.0, 0.0, -math.inf]).requires_grad_()
    old_logp = torch.tensor([0.0, 0.0, 0.0, -100.0, -500.0, -1e4, 0.0])
    result = surrogate(logp, old_logp, torch.full((7,), advantage))
    (gradient,) = torch.autograd.grad(result.value.sum(), logp)
    assert result.value.isfinite().all()
    assert gradient.isfinite().all()
    if advantage > 0:  # 0 below and 1 + ε above, both times Â.
        torch.testing.assert_close(result.value, torch.tensor([0, 0, 0, 2.4, 2.4, 2.4, 0]), atol=1e-8, rtol=1e-6)
    if advantage < 0:  # 1 - ε below; above, the objective is unbounded, held only by the clamp of the ratio.
        torch.testing.assert_close(result.value[[0, 1, 2, 6]], torch.full((4,), -1.6))
        assert (result.value[3:6] < -1e6).all()


def test_at_ratio_one_the_gradient_is_the_advantage():
    rollouts = rollouts_of([5])
    logp = rollouts.old_logp.clone().requires_grad_()
    result = Clipped()(logp, rollouts.old_logp, rollouts)
    (gradient,) = torch.autograd.grad(result.value.sum(), logp)
    assert result.value.tolist() == gradient.tolist() == rollouts.advantage.tolist()


def test_zero_advantage_is_never_clipped_and_pushes_nowhere():
    logp = torch.tensor([-3.0, 0.0, -0.1]).requires_grad_()
    result = surrogate(logp, torch.tensor([-0.1, -3.0, -0.1]), torch.zeros(3))
    (gradient,) = torch.autograd.grad(result.value.sum(), logp)
    assert result.value.tolist() == gradient.tolist() == [0, 0, 0]
    assert not (result.clipped_low | result.clipped_high).any()


@pytest.mark.parametrize(("key", "value"), [("clip_low", -0.1), ("clip_low", 1.1), ("clip_high", -0.5)])
def test_bounds_out_of_range_are_refused_by_name(key, value):
    with pytest.raises(UsageError, match=f"{key}={value}"):
        Clipped(**{key: value})
