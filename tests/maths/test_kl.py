import math
from typing import Any

import pytest
import torch
from helpers.contracts import needs
from helpers.reward_batches import batch_of
from helpers.tiny import rollouts_of
from torch import Tensor

from grpo_lightning.command.overview import optional
from grpo_lightning.maths.advantages import GroupStd
from grpo_lightning.maths.kl import K1, K2, K3, KLEstimator, KLPenalty, without_rounding

ImportanceWeighted: Any = optional("ImportanceWeighted")
BatchStd: Any = optional("BatchStd")
Sign: Any = optional("Sign")


def k3(theta: list[float], ref: list[float]) -> list[float]:
    logp = torch.tensor(theta).log()
    return K3()(logp, torch.tensor(ref).log(), logp).tolist()


def value_and_gradient(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor | None = None, kl: KLEstimator | None = None
) -> tuple[Tensor, Tensor]:
    """Of k3 and on policy unless said otherwise."""
    logp = logp.clone().requires_grad_()
    value = (kl or K3())(logp, ref_logp, logp.detach() if old_logp is None else old_logp)
    return value.detach(), torch.autograd.grad(value.sum(), logp)[0]


def test_values_by_hand():
    # π_ref/π_θ = 2: 2 - 0.693147 - 1. 1/2: 0.5 + 0.693147 - 1.
    # 10: 10 - 2.302585 - 1. 0.1: 0.1 + 2.302585 - 1.
    values = k3([0.2, 0.8, 0.05, 0.5], [0.4, 0.4, 0.5, 0.05])
    assert values == pytest.approx([0.3068528, 0.1931472, 6.6974149, 1.4025851], rel=1e-5)


def test_elsewhere_the_value_is_positive_however_little_they_differ():
    # k3 is d²/2 for a small log-ratio d: exp(d) - d - 1 in float32 would be lost in rounding, or negative.
    difference = torch.tensor([s * 10.0**-e for e in range(1, 7) for s in (1, -1)])
    value, _ = value_and_gradient(torch.zeros_like(difference), difference)
    exact = [math.expm1(d) - d for d in difference.tolist()]
    assert all(v > 0 for v in value[:8].tolist())
    assert value.tolist() == pytest.approx(exact, rel=2e-2, abs=1e-12)
    value, _ = value_and_gradient(torch.zeros(1000), torch.linspace(-5, 5, 1000))
    assert (value > 0).all()


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


def test_k1_and_k2_by_hand():
    # log(0.2/0.4) = -0.693147 and log(0.5/0.05) = 2.302585; their squares' halves 0.240227 and 2.650949.
    logp, ref_logp = torch.tensor([0.2, 0.5]).log(), torch.tensor([0.4, 0.05]).log()
    value, gradient = value_and_gradient(logp, ref_logp, kl=K1())
    assert value.tolist() == pytest.approx([-0.6931472, 2.3025851], rel=1e-6)
    assert gradient.tolist() == [1, 1]
    value, gradient = value_and_gradient(logp, ref_logp, kl=K2())
    assert value.tolist() == pytest.approx([0.2402265, 2.6509491], rel=1e-6)
    assert gradient.tolist() == pytest.approx([-0.6931472, 2.3025851], rel=1e-6)


def average(kl: KLEstimator, logits: Tensor, ref: Tensor, old: Tensor) -> tuple[float, Tensor]:
    """The estimate's exact average over tokens drawn from π_old, and that of its gradient by the logits."""
    logits = logits.clone().requires_grad_()
    value = (old * kl(logits.log_softmax(0), ref.log(), old.log())).sum()
    return float(value.detach()), torch.autograd.grad(value, logits)[0]


def divergence(logits: Tensor, ref: Tensor, reverse: bool) -> tuple[float, Tensor]:
    """D_KL[π_θ || π_ref], or forward D_KL[π_ref || π_θ], summed over the vocabulary."""
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(0)
    value = (logp.exp() * (logp - ref.log())).sum() if reverse else (ref * (ref.log() - logp)).sum()
    return float(value.detach()), torch.autograd.grad(value, logits)[0]


@needs(ImportanceWeighted)
def test_what_each_estimator_is_on_average():
    logits = torch.tensor([1.0, 0.2, -0.5, -1.5], dtype=torch.float64)
    theta, ref = logits.softmax(0), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    old = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    exact, slope = divergence(logits, ref, reverse=True)
    # On policy k1 and k3 have the right value; k1 no gradient at all, k2 the right one, k3 the forward KL's.
    assert average(K1(), logits, ref, theta)[0] == pytest.approx(exact)
    assert average(K1(), logits, ref, theta)[1].tolist() == pytest.approx([0] * 4, abs=1e-12)
    assert average(K2(), logits, ref, theta)[0] != pytest.approx(exact, rel=0.01)
    assert average(K2(), logits, ref, theta)[1].tolist() == pytest.approx(slope.tolist())
    assert average(K3(), logits, ref, theta)[0] == pytest.approx(exact)
    forward = divergence(logits, ref, reverse=False)[1]
    assert average(K3(), logits, ref, theta)[1].tolist() == pytest.approx(forward.tolist())
    # Off policy only the weighted ones are right, in both.
    assert average(K3(), logits, ref, old)[0] != pytest.approx(exact, rel=0.01)
    for kl in (ImportanceWeighted(), ImportanceWeighted(K1())):
        for drawn_from in (theta, old):
            value, gradient = average(kl, logits, ref, drawn_from)
            assert value == pytest.approx(exact)
            assert gradient.tolist() == pytest.approx(slope.tolist())


def test_the_default_kl_in_the_reward_is_k1():
    assert isinstance(KLPenalty().kl, K1)
    assert isinstance(KLPenalty(0.1, K3()).kl, K3)
    assert KLPenalty(0.1).beta == 0.1


@pytest.mark.parametrize(("error", "are_equal"), [(1e-6, True), (1e-3, False)])
def test_kls_that_differ_by_rounding_alone_are_equal_rewards(error, are_equal):
    """Two groups of four completions; all of a group have the same KL, 0 and 0.5 a token, but for the passes' error."""
    lengths = [3, 8, 1, 5, 2, 2, 2, 2]
    rollouts = rollouts_of(lengths, prompt_lengths=[2, 2], group=[0] * 4 + [1] * 4)
    noise = error * torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0))
    rollouts.old_logp = torch.full((sum(lengths),), -0.7)
    rollouts.ref_logp = rollouts.old_logp - 0.5 * rollouts.per_token(rollouts.group == 1) + noise
    rewards = batch_of([[1, 1, 1, 1, 1, 1, 0, 0]], [1], rollouts.group.tolist(), lengths)
    for estimator in (GroupStd(), *([BatchStd(), Sign()] if BatchStd else [])):
        penalised = KLPenalty(beta=0.2)(rewards, rollouts)
        advantage = estimator.per_token(penalised).split(lengths)
        assert all(bool((part == 0).all()) for part in advantage[:4]) == are_equal, estimator
        assert not advantage[4].equal(advantage[6])
    assert bool((penalised.value[1, :4] == penalised.value[1, 0]).all()) == are_equal
    assert penalised.value[1, 4:].tolist() == pytest.approx([1.0] * 4, abs=1e-2)


def test_a_penalty_of_nobody():
    none = torch.zeros(0)
    assert without_rounding(none.double(), none.long(), none).shape == (0,)
