import math
from typing import Any

import pytest
import torch
from helpers.contracts import needs
from helpers.tiny import rollouts_of, rows_of
from torch import Tensor

from grpo_lightning import Clipped, Diagnostics, Objective, Reinforce, Rollouts, Truncated, per_element
from grpo_lightning.command.overview import optional
from grpo_lightning.maths.entropy import FixedEntropy
from grpo_lightning.maths.filters import TokenMask
from grpo_lightning.maths.kl import K1
from grpo_lightning.maths.weightings import BatchSize, SequenceMean, TokenMean, TokenWeighting

TopEntropy: Any = optional("TopEntropy")
OffPolicyMask: Any = optional("OffPolicyMask")
ImportanceWeighted: Any = optional("ImportanceWeighted")
GroupTokenMean: Any = optional("GroupTokenMean")

# Two prompts, G = 4.
LENGTHS, GROUP = [3, 7, 1, 5, 2, 4, 6, 1], [0, 0, 0, 0, 1, 1, 1, 1]


def random_rollouts(seed: int) -> tuple[Rollouts, Tensor]:
    """Rollouts weighted by GRPO's averages, and log π_θ a little away from log π_old."""
    rollouts = rollouts_of(LENGTHS, prompt_lengths=[3, 2], group=GROUP, seed=seed)
    batch = BatchSize(num_completions=8, num_groups=2, num_tokens=sum(LENGTHS))
    rollouts.weight = per_element(SequenceMean()(rollouts.lengths, rollouts.group, batch), rollouts.lengths)
    generator = torch.Generator().manual_seed(100 + seed)
    logp = rollouts.old_logp + 0.3 * torch.randn(rollouts.num_tokens, generator=generator)
    return rollouts, logp.requires_grad_()


def evaluate(objective: Objective, logp: Tensor, rollouts: Rollouts) -> tuple[Tensor, Tensor, Diagnostics]:
    """J, dJ/dlogp and the diagnostics."""
    value, diagnostics = objective(logp, torch.zeros_like(logp), rollouts)
    return value.detach(), torch.autograd.grad(value, logp)[0], diagnostics


def rows_with_logp(rollouts: Rollouts, logp: Tensor) -> list[dict[str, Any]]:
    rows = rows_of(rollouts)
    for row, values in zip(rows, logp.detach().split(rollouts.lengths.tolist()), strict=True):
        row["logp"] = values.tolist()
    return rows


def eq_3(rows: list[dict[str, Any]], groups: list[list[int]], epsilon: float, beta: float) -> float:
    """J_GRPO of DeepSeekMath, Eq. 3 with Eq. 4, in Python floats; the expectation is a mean over prompts."""
    over_prompts = 0.0
    for members in groups:
        over_group = 0.0
        for i in members:
            over_tokens = 0.0
            for logp, old, ref, advantage in zip(
                rows[i]["logp"], rows[i]["old_logp"], rows[i]["ref_logp"], rows[i]["advantage"], strict=True
            ):
                ratio = math.exp(logp) / math.exp(old)
                clipped = min(max(ratio, 1 - epsilon), 1 + epsilon)
                kl = math.exp(ref) / math.exp(logp) - math.log(math.exp(ref) / math.exp(logp)) - 1
                over_tokens += min(ratio * advantage, clipped * advantage) - beta * kl
            over_group += over_tokens / len(rows[i]["logp"])
        over_prompts += over_group / len(members)
    return over_prompts / len(groups)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("beta", [0.0, 0.04, 1.0])
def test_on_policy_gradient_is_eq_21(seed, beta):
    rollouts, _ = random_rollouts(seed)
    logp = rollouts.old_logp.clone().requires_grad_()
    expected = rollouts.advantage + beta * ((rollouts.ref_logp - rollouts.old_logp).exp() - 1)
    _, gradient, _ = evaluate(Objective(beta=beta), logp, rollouts)
    torch.testing.assert_close(gradient, rollouts.weight * expected, rtol=1e-5, atol=1e-7)
    # Without an old policy the ratio is 1 and only its value: the same gradient.
    rollouts.old_logp = None
    _, gradient, _ = evaluate(Objective(beta=beta), logp, rollouts)
    torch.testing.assert_close(gradient, rollouts.weight * expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("epsilon", [0.1, 0.2])
def test_objective_is_eq_3_computed_in_loops(seed, beta, epsilon):
    rollouts, logp = random_rollouts(seed)
    value, _, _ = evaluate(Objective(surrogate=Clipped(epsilon, epsilon), beta=beta), logp, rollouts)
    groups = [[i for i in range(8) if GROUP[i] == g] for g in (0, 1)]
    assert float(value) == pytest.approx(
        eq_3(rows_with_logp(rollouts, logp), groups, epsilon, beta), rel=1e-5, abs=1e-6
    )


def test_beta_zero_needs_no_reference_and_ignores_one():
    rollouts, logp = random_rollouts(2)
    with_reference = evaluate(Objective(), logp, rollouts)
    rollouts.ref_logp = None
    without = evaluate(Objective(), logp, rollouts)
    assert with_reference[0] == without[0]
    assert with_reference[1].equal(without[1])
    assert float(without[2].kl_ref) == 0
    # Where there is a reference, it is watched all the same.
    assert float(with_reference[2].kl_ref) > 0


def test_diagnostics_are_sums_over_the_tokens():
    rollouts, logp = random_rollouts(4)
    entropy = torch.linspace(0.5, 2.5, rollouts.num_tokens)
    value, diagnostics = Objective(surrogate=Clipped(0.2, 0.28), beta=0.04)(logp, entropy, rollouts)
    expected = dict.fromkeys(Diagnostics.__dataclass_fields__, 0.0)
    for row in rows_with_logp(rollouts, logp):
        for new, old, ref, advantage in zip(
            row["logp"], row["old_logp"], row["ref_logp"], row["advantage"], strict=True
        ):
            ratio = math.exp(new - old)
            expected["tokens"] += 1
            expected["has_advantage"] += advantage != 0
            expected["unreachable"] += math.exp(old) * 1.28 > 1 and advantage > 0
            expected["ratio"] += ratio
            expected["kl_ref"] += math.exp(ref - new) - (ref - new) - 1
            expected["kl_old"] += ratio - math.log(ratio) - 1
            expected["clipped_low"] += ratio < 0.8 and advantage < 0
            expected["clipped_high"] += ratio > 1.28 and advantage > 0
            expected["ratio_max"] = max(expected["ratio_max"], ratio)
    expected["entropy"] = math.fsum(entropy.tolist())
    expected["objective"] = float(value.detach())
    assert expected["clipped_low"] > 0
    assert expected["unreachable"] > 0
    assert expected["clipped_high"] > 0
    assert {name: float(getattr(diagnostics, name)) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert not any(getattr(diagnostics, name).requires_grad for name in expected)


def test_kl_to_the_old_policy_is_not_lost_in_rounding():
    # After small updates, log-ratios of 1e-4 mean a KL of 5e-9 a token: exp(d) - d - 1 gives 0.
    rollouts = rollouts_of([1000])
    logp = (rollouts.old_logp.double() + 1e-4).float()
    exact = sum(math.expm1(d) - d for d in (logp.double() - rollouts.old_logp.double()).tolist())
    _, diagnostics = Objective()(logp, torch.zeros_like(logp), rollouts)
    assert float(diagnostics.kl_old) == pytest.approx(exact, rel=1e-2)


def test_diagnostics_of_micro_batches_and_ranks_add_up():
    names = [*Diagnostics.__dataclass_fields__][:-1]

    def made(start: float, ratio_max: float) -> Diagnostics:
        numbers = {name: start + i for i, name in enumerate(names)} | {"ratio_max": ratio_max}
        return Diagnostics(**{name: torch.tensor(number) for name, number in numbers.items()})

    def two_ranks(values: Tensor, reduce_op: str) -> Tensor:
        """The other rank has the same numbers plus 1."""
        return {"sum": 2 * values + 1, "max": values + 1}[reduce_op]

    added = made(1.0, 3.0) + made(10.0, 7.0), made(1.0, 7.0) + made(10.0, 3.0)
    for total, largest in zip((*added, made(5.0, 2.0).reduce(two_ranks)), (7, 7, 3), strict=True):
        assert float(total.ratio_max) == largest
        assert [float(getattr(total, name)) for name in names] == [11.0 + 2 * i for i in range(len(names))]


# Entropy, masks and other estimators of the KL


def test_the_entropy_bonus_by_hand():
    # One token, Reinforce: J = w (Â log π + c H) with H of three tokens, 1/2, 1/4 and 1/4: 1.5 log 2.
    logits = torch.tensor([0.5, 0.25, 0.25]).log().requires_grad_()
    rollouts = rollouts_of([1])
    rollouts.advantage, rollouts.weight = torch.tensor([2.0]), torch.tensor([0.5])
    logp = logits.log_softmax(0)
    entropy = -(logp.exp() * logp).sum()[None]
    value, diagnostics = Objective(Reinforce(), entropy=FixedEntropy(0.1))(logp[:1], entropy, rollouts)
    assert float(value.detach()) == pytest.approx(0.5 * (-2 * math.log(2) + 0.1 * 1.5 * math.log(2)))
    assert float(diagnostics.entropy) == pytest.approx(1.5 * math.log(2))
    # d log π_1 / d logits = (1, 0, 0) - π; dH / d logits_k = -π_k (log π_k + H): -(1/2)(0.5 log 2), (1/4)(0.5 log 2).
    (gradient,) = torch.autograd.grad(value, logits)
    slope = 0.25 * math.log(2)
    expected = [0.5 - 0.05 * slope, -0.25 + 0.025 * slope, -0.25 + 0.025 * slope]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-5)


def test_beta_and_entropy_give_a_gradient_without_advantage():
    assert Objective().learns_from_advantage_alone
    assert not Objective(beta=0.1).learns_from_advantage_alone
    assert not Objective(entropy=FixedEntropy(0.1)).learns_from_advantage_alone


@needs(TopEntropy)
def test_masks_take_the_weight_of_their_tokens_only():
    rollouts = rollouts_of([2, 1, 3], prompt_lengths=[2])
    rollouts.truncated = torch.tensor([False, False, True])
    rollouts.columns["entropy_rank"] = torch.tensor([0.9, 0.1, 0.85, 0.95, 0.2, 0.3])
    batch = BatchSize(num_completions=3, num_groups=1, num_tokens=6)

    def weight(*masks: Any) -> list[float]:
        return Objective(masks=list(masks)).token_weight(rollouts, batch).tolist()

    # 1 / (3 |o_i|), as if nobody were masked.
    assert weight() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9])
    assert weight(Truncated()) == pytest.approx([1 / 6, 1 / 6, 1 / 3, 0, 0, 0])
    assert weight(TopEntropy(0.2)) == pytest.approx([1 / 6, 0, 1 / 3, 1 / 9, 0, 0])
    assert weight(Truncated(), TopEntropy(0.2)) == pytest.approx([1 / 6, 0, 1 / 3, 0, 0, 0])


def test_tokens_without_advantage_count_and_have_no_gradient():
    rollouts = rollouts_of([4])
    rollouts.advantage = torch.tensor([1.0, 0.0, -1.0, 0.0])
    rollouts.weight = torch.tensor([0.5, 0.5, 0.0, 0.0])
    logp = rollouts.old_logp + torch.tensor([0.0, 0.0, 1.0, 2.0])
    _, gradient, diagnostics = evaluate(Objective(), logp.requires_grad_(), rollouts)
    assert (float(diagnostics.tokens), float(diagnostics.has_advantage)) == (2, 1)
    # Tokens without weight count nowhere.
    assert (float(diagnostics.ratio), float(diagnostics.ratio_max)) == (2, 1)
    assert gradient.tolist() == [0.5, 0, 0, 0]


@needs(ImportanceWeighted)
def test_the_kl_estimator_sees_the_old_policy():
    # π_θ = 0.2, π_ref = 0.4, π_old = 0.1: ratio 2, k1 = log(1/2). J = 2 Â - β 2 log(1/2), Â = 1 and no bounds.
    rollouts = rollouts_of([1])
    rollouts.advantage, rollouts.weight = torch.ones(1), torch.ones(1)
    rollouts.old_logp, rollouts.ref_logp = torch.tensor([0.1]).log(), torch.tensor([0.4]).log()
    logp = torch.tensor([0.2]).log().requires_grad_()
    objective = Objective(Clipped(None, None), kl=ImportanceWeighted(K1()), beta=0.5)
    value, gradient, diagnostics = evaluate(objective, logp, rollouts)
    assert float(value) == pytest.approx(2 + math.log(2))
    assert float(gradient) == pytest.approx(2 - 0.5 * 2 * (1 + math.log(0.5)))
    assert float(diagnostics.kl_ref) == pytest.approx(-2 * math.log(2))
    # On policy the weight is 1 and gives a gradient all the same.
    rollouts.old_logp = None
    _, gradient, _ = evaluate(objective, logp, rollouts)
    assert float(gradient) == pytest.approx(1 - 0.5 * (1 + math.log(0.5)))


@needs(GroupTokenMean)
def test_what_the_denominators_count():
    # Three completions of two groups; the second is truncated, and the second group has no advantage.
    rollouts = rollouts_of([2, 3, 1], prompt_lengths=[2, 2], group=[0, 0, 1])
    rollouts.truncated = torch.tensor([False, True, False])
    rollouts.advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.0])

    def weight(weighting: TokenWeighting, denominator: str) -> tuple[BatchSize, list[float]]:
        objective = Objective(weighting=weighting, masks=[Truncated()], denominator=denominator)
        batch = BatchSize.of_all_ranks(rollouts, objective.counted(rollouts), 8)
        return batch, objective.token_weight(rollouts, batch).tolist()

    size, found = weight(TokenMean(), "sampled")
    assert size == BatchSize(3, 2, 6, 8) and found == pytest.approx([1 / 6, 1 / 6, 0, 0, 0, 1 / 6])
    size, found = weight(TokenMean(), "kept")
    assert size == BatchSize(2, 2, 3, 8) and found == pytest.approx([1 / 3, 1 / 3, 0, 0, 0, 1 / 3])
    size, found = weight(TokenMean(), "has_advantage")
    assert size == BatchSize(1, 1, 2, 8) and found[:5] == pytest.approx([1 / 2, 1 / 2, 0, 0, 0])
    assert weight(SequenceMean(), "kept")[1] == pytest.approx([1 / 4, 1 / 4, 0, 0, 0, 1 / 2])
    # The second group is left out whole; the first has two tokens, since what is masked counts as none.
    assert weight(GroupTokenMean(), "kept")[1] == pytest.approx([1 / 4, 1 / 4, 0, 0, 0, 1 / 2])
    assert weight(GroupTokenMean(), "has_advantage")[1][:5] == pytest.approx([1 / 2, 1 / 2, 0, 0, 0])

    class UnclampedMean(TokenWeighting):
        def __call__(self, lengths: torch.Tensor, group: torch.Tensor, batch: BatchSize) -> torch.Tensor:
            return 1 / (batch.num_completions * lengths)

    assert weight(UnclampedMean(), "kept") == weight(SequenceMean(), "kept")
    # Nobody is left: no division by 0.
    rollouts.truncated[:] = True
    for weighting in (TokenMean(), SequenceMean(), GroupTokenMean(), UnclampedMean()):
        assert weight(weighting, "kept") == (BatchSize(1, 1, 1, 8), [0.0] * 6)


def test_a_mask_may_be_a_factor():
    class Twice(TokenMask):
        def __call__(self, rollouts: Rollouts) -> torch.Tensor:
            return torch.tensor([2.0, 0.5, 0.0])

    rollouts = rollouts_of([3])
    objective = Objective(masks=[Twice(), Twice()])
    assert objective.token_weight(rollouts, BatchSize(1, 1, 3)).tolist() == pytest.approx([4 / 3, 1 / 12, 0])


@needs(OffPolicyMask)
def test_a_surrogate_may_move_tokens_without_advantage():
    class Penalty(Reinforce):
        moves_without_advantage = True

    assert not Objective(Penalty()).learns_from_advantage_alone
    assert not Objective(OffPolicyMask(Penalty())).learns_from_advantage_alone
