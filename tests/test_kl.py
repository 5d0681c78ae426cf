import math

import pytest
import torch
from torch import Tensor

from grpo_lightning.kl import K3


def k3(theta: list[float], ref: list[float]) -> list[float]:
    return K3()(torch.tensor(theta).log(), torch.tensor(ref).log()).tolist()


def value_and_gradient(logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor]:
    logp = logp.clone().requires_grad_()
    value = K3()(logp, ref_logp)
    return value.detach(), torch.autograd.grad(value.sum(), logp)[0]


def test_values_by_hand():
    # π_ref/π_θ = 2: 2 - 0.693147 - 1. 1/2: 0.5 + 0.693147 - 1.
    # 10: 10 - 2.302585 - 1. 0.1: 0.1 + 2.302585 - 1.
    values = k3([0.2, 0.8, 0.05, 0.5], [0.4, 0.4, 0.5, 0.05])
    assert values == pytest.approx([0.3068528, 0.1931472, 6.6974149, 1.4025851], rel=1e-5)


def test_where_the_policies_agree_value_and_gradient_are_exactly_zero():
    logp = torch.tensor([0.001, 0.3, 0.999, 1.0]).log()
    value, gradient = value_and_gradient(logp, logp)
    assert value.tolist() == gradient.tolist() == [0, 0, 0, 0]


def test_elsewhere_the_value_is_positive_however_little_they_differ():
    # k3 is d²/2 for a small log-ratio d: exp(d) - d - 1 in float32 would be lost in rounding, or negative.
    difference = torch.tensor([s * 10.0**-e for e in range(1, 7) for s in (1, -1)])
    value, _ = value_and_gradient(torch.zeros_like(difference), difference)
    exact = [math.expm1(d) - d for d in difference.tolist()]
    assert all(v > 0 for v in value[:8].tolist())
    assert value.tolist() == pytest.approx(exact, rel=2e-2, abs=1e-12)
    value, _ = value_and_gradient(torch.zeros(1000), torch.linspace(-5, 5, 1000))
    assert (value > 0).all()


def test_gradient_is_one_minus_the_ratio_of_reference_and_policy():
    theta, ref = torch.cartesian_prod(torch.linspace(0.01, 1, 34), torch.linspace(0.01, 1, 34)).T
    _, gradient = value_and_gradient(theta.log(), ref.log())
    torch.testing.assert_close(gradient, 1 - ref / theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("log_ref", [-21.0, -50.0, -115.0, -1000.0, -1e6])
def test_gradient_is_one_where_the_reference_finds_the_token_impossible(log_ref):
    # 1 - π_ref/π_θ with π_ref = 0, and the value -log(π_ref/π_θ) - 1: the pull to the reference does not end.
    value, gradient = value_and_gradient(torch.tensor([-0.5]), torch.tensor([log_ref]))
    assert gradient.tolist() == pytest.approx([1.0], abs=1e-6)
    assert value.tolist() == pytest.approx([-0.5 - log_ref - 1], rel=1e-6)


@pytest.mark.parametrize("logp", [-30.0, -100.0, -1000.0, -math.inf])
def test_where_the_policy_finds_the_token_impossible_nothing_overflows(logp):
    value, gradient = value_and_gradient(torch.tensor([logp]), torch.tensor([-0.5]))
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert float(gradient) <= 0  # Never away from the reference.


def test_expectation_over_the_policy_is_the_kl_divergence():
    theta = torch.tensor([0.5, 0.3, 0.15, 0.05])
    ref = torch.tensor([0.25, 0.25, 0.25, 0.25])
    exact = sum(p * math.log(p / q) for p, q in zip(theta.tolist(), ref.tolist(), strict=True))
    assert float((theta * K3()(theta.log(), ref.log())).sum()) == pytest.approx(exact, abs=1e-6)
