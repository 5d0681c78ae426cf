"""The methods of examples/methods_of_2026 by numbers worked out by hand; test_contracts.py has their contracts."""

import math
from itertools import combinations

import pytest
import torch
from helpers.by_hand import rollouts_with
from helpers.loading import load_example
from helpers.reward_batches import batch_of
from torch import Tensor

from grpo_lightning import Objective, Rollouts, Surrogate, TokenMean
from grpo_lightning.maths.weightings import BatchSize

methods = load_example("methods_of_2026")


def slopes(member: Surrogate, rollouts: Rollouts, ratio: list[float]) -> Tensor:
    rollouts.add_columns(member.prepare(rollouts))
    assert rollouts.old_logp is not None
    logp = (rollouts.old_logp + torch.tensor(ratio).log()).requires_grad_()
    return torch.autograd.grad(member(logp, rollouts.old_logp, rollouts).value.sum(), logp)[0]


def test_up() -> None:
    # Good tokens have slope Â, however far they are; bad ones r Â, 0 under 0.8 and over 3.
    rollouts = rollouts_with([[1, 2], [1, 2, 3]], [2.0, -1.0])
    assert slopes(methods.UP(), rollouts, [9.0, 0.1, 0.5, 2.0, 4.0]).tolist() == pytest.approx([2, 2, 0, -2, 0])


def test_fipo() -> None:
    # Half a life of one token: γ = 1/2. Ratios e^0.1, 1, e^0.08: exponents 0.1 + 0.02, 0.04 and 0.08.
    member = methods.FIPO(half_life=1.0, reach=0.1)
    found = slopes(member, rollouts_with([[1, 2, 3]], [1.0]), [math.exp(0.1), 1.0, math.exp(0.08)])
    assert found.tolist() == pytest.approx([1.1 * math.exp(0.1), math.exp(0.04), math.exp(0.16)])
    # What follows has become less likely: not under 1.
    assert slopes(member, rollouts_with([[1, 2]], [1.0]), [1.0, 0.5]).tolist() == pytest.approx([1, 0.5])


def test_clip_cov_and_kl_cov() -> None:
    # Means 0 and log of (1, 1, 1, 16)/16: 3/4 log(1/16). Covariances: the last has 1 * 3/4 log 16, the largest.
    rollouts = rollouts_with([[1, 2], [1, 2]], [-1.0, 1.0], [1 / 16, 1 / 16, 1 / 16, 1.0])
    assert methods.covariance(rollouts).tolist() == pytest.approx(
        [math.log(16) / 4, math.log(16) / 4, -math.log(16) / 4, math.log(16) * 3 / 4]
    )
    ratio = [1.0, 1.0, 1.0, 0.9]
    assert slopes(methods.ClipCov(0.3), rollouts, ratio).tolist() == pytest.approx([-1, -1, 1, 0])
    # 0.9 Â, and the slope of -2 |log r| where r < 1: +2.
    assert slopes(methods.KLCov(0.3, beta=2.0), rollouts, ratio).tolist() == pytest.approx([-1, -1, 1, 2.9])


def test_dro_moves_tokens_without_advantage() -> None:
    # Â - β log r.
    rollouts = rollouts_with([[1], [2]], [0.5, 0.0])
    found = slopes(methods.DRO(beta=2.0), rollouts, [math.e, math.e**-1])
    assert found.tolist() == pytest.approx([-1.5, 2.0])
    assert not Objective(methods.DRO()).learns_from_advantage_alone


def test_m2po() -> None:
    # Squares of log(π_old/μ): 0, 0.01, 0.04, 0.25: means 0, 0.005, 0.0167, 0.075. Up to 0.04 three stay.
    rollouts = rollouts_with([[1, 2], [1, 2]], [1.0, -1.0])
    change = torch.tensor([-0.1, 0.5, 0.0, 0.2])
    rollouts.sampler_logp = rollouts.old_logp - change
    objective = Objective(correction=methods.M2PO(tau=0.04))
    rollouts.add_columns(objective.prepare(rollouts))
    expected = [math.exp(-0.1), 0, 1, math.exp(0.2)]
    assert objective.factor(rollouts.old_logp, rollouts).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_rank_without_completions_takes_part() -> None:
    nobody = rollouts_with([[1]], [1.0]).select(torch.zeros(0, dtype=torch.int64))
    for part in (methods.M2PO(), methods.ClipCov(), methods.KLCov()):
        assert [values.shape for values in part.prepare(nobody).values()] == [(0,)]
    assert methods.GTPO()(nobody).shape == (0,)


def test_gtpo() -> None:
    # 5 begins a good and a bad completion, 9 ends both; 6 and 7 differ. The third, of another group, has no conflict.
    rollouts = Rollouts.from_lists([[1], [2]], [0, 0, 1], [[5, 6, 9], [5, 7, 7, 9], [5, 6]])
    rollouts.advantage = torch.tensor([1.0, -1.0, 1.0]).repeat_interleave(rollouts.lengths)
    assert methods.GTPO()(rollouts).tolist() == [2, 1, 2, 0, 1, 1, 0, 1, 1]
    # As a factor of the weight, and in the denominator: 7 of the 9 tokens are left.
    objective = Objective(weighting=TokenMean(), masks=[methods.GTPO()], denominator="kept")
    batch = BatchSize.of_all_ranks(rollouts, objective.counted(rollouts), 4)
    assert batch == BatchSize(3, 2, 7, 4)
    weight = objective.token_weight(rollouts, batch)
    assert weight.tolist() == pytest.approx([2 / 7, 1 / 7, 2 / 7, 0, 1 / 7, 1 / 7, 0, 1 / 7, 1 / 7])


def test_top_d() -> None:
    # α = 1: dense rewards log T/π of 1, 2, 3 and 4. Returns 1 + 5/2, 2 + 3, 3 and 4, of mean 31/8.
    batch = batch_of([[0.0, 1.0]], [1.0], [0, 0], [3, 1])
    batch.columns = {"ref_logp": torch.tensor([1.0, 2.0, 3.0, 4.0]), "old_logp": torch.zeros(4)}
    deviation = [value - 31 / 8 for value in (3.5, 5, 3, 4)]
    std = math.sqrt(sum(value**2 for value in deviation) / 4)
    expected = [value / std for value in deviation]
    assert methods.TOPD(alpha=1.0).per_token(batch).tolist() == pytest.approx(expected, rel=1e-5)


def test_opo() -> None:
    # Lengths 1, 3 and 4 of rewards 1, 0, 1: baseline 5/8.
    batch = batch_of([[1, 0, 1, math.nan]], [1.0], [0, 0, 0, 0], [1, 3, 4, 2])
    expected = [3 / 8] * 1 + [-5 / 8] * 3 + [3 / 8] * 4 + [0] * 2
    assert methods.OPO().per_token(batch).tolist() == pytest.approx(expected)


def test_pass_at_k_is_the_mean_over_all_sets() -> None:
    rewards = [0.3, 1.0, -2.0, 0.3, 0.7, 1.0]
    sets = [(one, max(rewards[i] for i in one)) for one in combinations(range(6), 3)]
    mean = math.fsum(value for _, value in sets) / len(sets)
    std = math.sqrt(math.fsum((value - mean) ** 2 for _, value in sets) / len(sets))
    found = methods.PassAtK(3, 0.0)(torch.tensor(rewards, dtype=torch.float64), torch.zeros(6, dtype=torch.int64))
    for index, advantage in enumerate(found.tolist()):
        own = [value for one, value in sets if index in one]
        assert advantage == pytest.approx((math.fsum(own) / len(own) - mean) / std, abs=1e-6)


def test_linear_entropy() -> None:
    bonus, seen = methods.LinearEntropy(0.3, 0.1, updates=4), []
    for _ in range(6):
        seen.append(bonus.coefficient)
        bonus.observe(1.0)
    assert seen == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1, 0.1])
