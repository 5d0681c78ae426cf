"""Corrections and the mismatch against numbers by hand and an independent float64 loop."""

import math

import pytest
import torch
from helpers.contracts import make, members
from helpers.tiny import rollouts_of
from torch import Tensor

from grpo_lightning import Clipped, Objective, Reinforce, Rollouts
from grpo_lightning.maths.corrections import Correction, NoCorrection
from grpo_lightning.maths.mismatch import Mismatch
from grpo_lightning.plugins.methods.token_weights.mismatch_masks import (
    GeometricMask,
    ProbabilityGap,
    RatioMask,
    SequenceMask,
    inside,
)
from grpo_lightning.plugins.methods.token_weights.truncated_ratio import TruncatedRatio


def far_rollouts(seed: int = 0) -> Rollouts:
    """Completions of 1 to 40 tokens whose sampler is up to half a nat from π_old at a token."""
    rollouts = rollouts_of([1, 7, 40, 3, 2, 18, 5, 1], prompt_lengths=[3, 2], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    assert rollouts.old_logp is not None
    rollouts.sampler_logp = (rollouts.old_logp - 0.3 * torch.randn(rollouts.num_tokens, generator=generator)).clamp(
        max=-1e-3
    )
    return rollouts


def factor_of(correction: Correction, rollouts: Rollouts) -> Tensor:
    assert rollouts.old_logp is not None
    return Objective(correction=correction).factor(rollouts.old_logp, rollouts)


def by_hand(correction: Correction, advantage: float = 1.0) -> list[float]:
    """The factors of a completion of three tokens and one of a single token."""
    rollouts = rollouts_of([3, 1])
    rollouts.sampler_logp = torch.tensor([0.1, 0.5, 0.8, 0.02]).log()
    rollouts.old_logp = torch.tensor([0.4, 0.25, 0.8, 0.12]).log()
    rollouts.advantage = torch.full((4,), float(advantage))
    return factor_of(correction, rollouts).tolist()


def test_factors_by_hand() -> None:
    # Ratios 4, 1/2, 1 and 6; of the completions 2 and 6; their geometric means 2^(1/3) = 1.26 and 6.
    assert by_hand(NoCorrection()) == [1, 1, 1, 1]
    assert by_hand(TruncatedRatio()) == pytest.approx([2, 0.5, 1, 2])
    assert by_hand(TruncatedRatio(5)) == pytest.approx([4, 0.5, 1, 5])
    assert by_hand(RatioMask(0.4)) == pytest.approx([4, 0.5, 1, 0])
    assert by_hand(RatioMask(0.6, 6.1)) == pytest.approx([4, 0, 1, 6])
    assert by_hand(SequenceMask()) == pytest.approx([2, 2, 2, 0])
    assert by_hand(SequenceMask(low=0.9, high=1.9)) == [0, 0, 0, 0]
    assert by_hand(GeometricMask(high=1.3)) == [1, 1, 1, 0]
    assert by_hand(GeometricMask()) == [0, 0, 0, 0]
    # Gaps 0.3, -0.25, 0 and 0.1: a good token must not have risen too far, a bad one not fallen.
    assert by_hand(ProbabilityGap()) == pytest.approx([0, 0.5, 1, 6])
    assert by_hand(ProbabilityGap(), advantage=-1) == pytest.approx([4, 0, 1, 6])
    assert by_hand(ProbabilityGap(0.05)) == pytest.approx([0, 0.5, 1, 0])


def test_a_ratio_that_is_no_number_is_not_masked() -> None:
    masked = inside(torch.tensor([math.nan, 0.4, 0.5, 5.0, 5.1]), low=0.5, high=5.0)
    assert masked[0].isnan() and masked[1:].tolist() == [0, 0.5, 5, 0]


@pytest.mark.parametrize("cls", members(Correction), ids=lambda cls: cls.__name__)
def test_without_mismatch_every_factor_is_one(cls: type) -> None:
    rollouts = rollouts_of([5, 1, 9])
    rollouts.sampler_logp = rollouts.old_logp
    assert factor_of(make(cls), rollouts).tolist() == [1.0] * 15


@pytest.mark.parametrize("cls", members(Correction), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(("old", "sampler"), [(0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4)])
def test_factors_stay_finite_at_absurd_log_ratios(cls: type, old: float, sampler: float) -> None:
    rollouts = rollouts_of([60, 1])
    rollouts.old_logp, rollouts.sampler_logp = torch.full((61,), old), torch.full((61,), sampler)
    factor = factor_of(make(cls), rollouts)
    assert factor.isfinite().all() and (factor >= 0).all()


@pytest.mark.parametrize("cls", members(Correction), ids=lambda cls: cls.__name__)
def test_a_factor_depends_on_its_own_completion_alone(cls: type) -> None:
    rollouts = far_rollouts()
    factor = factor_of(make(cls), rollouts)
    for row, expected in enumerate(factor.split(rollouts.lengths.tolist())):
        assert factor_of(make(cls), rollouts.select(torch.tensor([row]))).tolist() == pytest.approx(expected.tolist())


def test_the_objective_multiplies_the_weight_by_the_factor() -> None:
    rollouts = far_rollouts()
    logp = (rollouts.old_logp + 0.01).requires_grad_()
    plain, corrected = (
        Objective(Reinforce(), beta=0.1),
        Objective(Reinforce(), beta=0.1, correction=RatioMask(0.8, 1.2)),
    )
    value, diagnostics = corrected(logp, torch.zeros_like(logp), rollouts)
    (gradient,) = torch.autograd.grad(value, logp)
    factor = factor_of(RatioMask(0.8, 1.2), rollouts)
    (expected,) = torch.autograd.grad((rollouts.weight * factor * plain.terms(logp, logp, rollouts).total).sum(), logp)
    assert torch.equal(gradient, expected)
    # What is masked counts nowhere.
    assert float(diagnostics.tokens) == int((factor != 0).sum()) < rollouts.num_tokens


def test_no_correction_changes_no_bit_and_reads_no_sampler() -> None:
    rollouts = far_rollouts()
    logp = rollouts.old_logp + 0.01
    value, _ = Objective()(logp, torch.zeros_like(logp), rollouts)
    assert torch.equal(value, (rollouts.weight * Clipped()(logp, rollouts.old_logp, rollouts).value).sum())
    rollouts.sampler_logp = None
    assert torch.equal(Objective()(logp, torch.zeros_like(logp), rollouts)[0], value)


def test_without_old_logp_the_factor_comes_from_the_policy() -> None:
    rollouts = far_rollouts()
    known = rollouts.old_logp
    objective = Objective(correction=TruncatedRatio(1.2))
    expected = objective(known, torch.zeros_like(known), rollouts)[0]
    rollouts.old_logp = None
    logp = known.clone().requires_grad_()
    value = objective(logp, torch.zeros_like(known), rollouts)[0]
    assert torch.equal(value, expected)
    # The factor has no gradient of its own: that of the ratio alone is left.
    (gradient,) = torch.autograd.grad(value, logp)
    factor = torch.minimum((known - rollouts.sampler_logp).exp(), torch.tensor(1.2))
    torch.testing.assert_close(gradient, rollouts.weight * factor * rollouts.advantage)


# The mismatch


def expected_mismatch(rollouts: Rollouts, factor: Tensor) -> dict[str, float]:
    """The metrics of the completions, in plain Python."""
    kl, gaps, corrected, masked, ratios = [], [], [], [], []
    start = 0
    for length in rollouts.lengths.tolist():
        tokens = range(start, start + length)
        start += length
        logs = [float(rollouts.old_logp[t]) - float(rollouts.sampler_logp[t]) for t in tokens]
        counted = [log for t, log in zip(tokens, logs, strict=True) if rollouts.weight[t] != 0]
        kl += [math.exp(log) - 1 - log for log in counted]
        gaps += [abs(log) for log in counted]
        factors = [float(factor[t]) for t in tokens if rollouts.weight[t] != 0]
        corrected += [abs(value - 1) > 0.01 for value in factors]
        masked += [value == 0 for value in factors]
        ratios += [math.exp(sum(logs))] if counted else []
    mean = sum(ratios) / len(ratios)
    return {
        "kl": sum(kl) / len(kl),
        "gap": max(gaps),
        "corrected": sum(corrected) / len(corrected),
        "masked": sum(masked) / len(masked),
        "ess": mean**2 / (sum(ratio**2 for ratio in ratios) / len(ratios)),
    }


def test_the_mismatch_of_micro_batches_equals_a_loop() -> None:
    rollouts = far_rollouts()
    rollouts.weight[3], rollouts.weight[-1] = 0.0, 0.0  # a token of the second completion, and the whole last one
    objective = Objective(correction=RatioMask(0.8, 1.2))

    def mismatch(rows: list[int]) -> Mismatch:
        micro_batch = rollouts.select(torch.tensor(rows))
        return Mismatch.from_micro_batch(
            micro_batch, micro_batch.old_logp, objective.factor(micro_batch.old_logp, micro_batch)
        )

    whole = mismatch([0, 3, 5]) + mismatch([7, 1, 2]) + mismatch([4, 6])
    off = (rollouts.old_logp - rollouts.sampler_logp)[rollouts.weight != 0].abs()
    assert 0 < int((off > 1).sum()) < len(off)
    assert whole.gaps() == pytest.approx((float(off.mean()), float((off > 1).float().mean())), rel=1e-5)
    found = whole.metrics()
    factor = objective.factor(rollouts.old_logp, rollouts)
    expected = {f"mismatch/{name}": value for name, value in expected_mismatch(rollouts, factor).items()}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, rel=1e-4)
    assert 0 < float(found["mismatch/masked"]) < float(found["mismatch/corrected"]) < 1
    assert float(found["mismatch/ess"]) < 0.9
