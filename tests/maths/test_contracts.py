"""What every member of a family keeps to. A new class is found by itself."""

import copy
import math
import random

import pytest
import torch
from helpers.by_hand import value_and_gradient
from helpers.contracts import SURROGATES, make, members
from helpers.tiny import branching_rollouts
from torch import Tensor

import grpo_lightning
from grpo_lightning.command.overview import optional
from grpo_lightning.maths import advantages, kl
from grpo_lightning.maths.advantages import AdvantageEstimator
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.entropy import EntropyBonus
from grpo_lightning.maths.filters import TokenMask
from grpo_lightning.maths.kl import KLEstimator
from grpo_lightning.maths.ragged import per_element
from grpo_lightning.maths.reward_batch import RewardBatch, SegmentRewards
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.stopping import StopRule
from grpo_lightning.maths.surrogates import Surrogate, SurrogateResult
from grpo_lightning.maths.weightings import BatchSize, TokenWeighting
from grpo_lightning.types import UsageError


def each(family: type) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cls", members(family), ids=lambda cls: cls.__name__)


def positions_of(rows: list[int], lengths: Tensor) -> Tensor:
    """Indices of the tokens of these rows, in their order."""
    tokens_of_row = torch.arange(int(lengths.sum())).split(lengths.tolist())
    return torch.cat([tokens_of_row[row] for row in rows])


def shuffled(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


# Advantages

INVARIANT, EQUIVARIANT = "invariant", "equivariant"
SCALING = {
    advantages.GroupMean: EQUIVARIANT,
    advantages.GroupStd: INVARIANT,
    advantages.NoBaseline: EQUIVARIANT,
    optional("BatchStd"): INVARIANT,
    optional("LeaveOneOut"): EQUIVARIANT,
    optional("PerRewardStd"): INVARIANT,
    optional("MaxRL"): INVARIANT,
    optional("NoAdvantage"): INVARIANT,
    optional("ProcessSupervision"): INVARIANT,
    optional("Sign"): INVARIANT,
}
"""What Â does where every reward is multiplied by one positive number."""


def random_rewards(seed: int) -> tuple[Tensor, Tensor]:
    """[B] float64 rewards that float32 can say too, some equal, and [B] groups, some of one."""
    rng = random.Random(seed)
    count = rng.randrange(6, 30)
    rewards = [rng.choice([0.0, 1.0, round(rng.gauss(0, 2) * 256) / 256]) for _ in range(count)]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor([rng.randrange(5) for _ in range(count)])


def close(left: Tensor, right: Tensor, tolerance: float = 1e-6) -> None:
    assert left.dtype == right.dtype == torch.float32
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@each(AdvantageEstimator)
@pytest.mark.parametrize("seed", range(2))
def test_advantages_do_not_depend_on_order_or_group_names(cls, seed):
    estimator: AdvantageEstimator = make(cls)
    reward, group = random_rewards(seed)
    expected = estimator(reward, group)
    order = torch.tensor(shuffled(len(reward), seed))
    close(estimator(reward[order], group[order]), expected[order])
    names = torch.tensor([7, 0, 3, 11, 4])
    close(estimator(reward, names[group]), expected)


@each(AdvantageEstimator)
@pytest.mark.parametrize("factor", [0.125, 20.0])
def test_advantages_of_scaled_rewards(cls, factor):
    if cls not in SCALING:
        pytest.fail(f"say in SCALING of test_contracts.py what {cls.__name__} does when rewards are scaled")
    estimator: AdvantageEstimator = make(cls)
    reward, group = random_rewards(0)
    expected = estimator(reward, group) * (factor if SCALING[cls] == EQUIVARIANT else 1)
    # Of the invariant ones advantage_eps is not scaled: 1e-6 beside standard deviations of 0.03 and more.
    close(estimator(reward * factor, group), expected, tolerance=1e-4)


@each(AdvantageEstimator)
@pytest.mark.parametrize("seed", range(2))
def test_failed_rewards_get_zero_and_change_no_other(cls, seed):
    estimator: AdvantageEstimator = make(cls)
    reward, group = random_rewards(seed)
    failed = torch.tensor([random.Random(seed + i).random() < 0.3 for i in range(len(reward))])
    failed[0] = True
    result = estimator(reward.masked_fill(failed, math.nan), group)
    assert result[failed].tolist() == [0.0] * int(failed.sum())
    close(result[~failed], estimator(reward[~failed], group[~failed]))
    assert estimator(torch.full_like(reward, math.nan), group).tolist() == [0.0] * len(reward)


@each(AdvantageEstimator)
@pytest.mark.parametrize("value", [0.0, 0.1, -0.7, 1e-30, 1e30])
def test_a_group_without_a_difference_gets_exactly_zero(cls, value):
    estimator: AdvantageEstimator = make(cls)
    # A group of one, one of equals, one of equals and a failure, one with a difference.
    reward = torch.tensor([value, value, value, value, value, math.nan, value, 0.0, 1.0], dtype=torch.float64)
    group = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3, 3])
    result = estimator(reward, group)
    if estimator.compares_group:
        assert result[:7].tolist() == [0.0] * 7
        assert float(result[7]) < 0 < float(result[8])
        assert estimator(reward[:7], group[:7]).tolist() == [0.0] * 7


@each(AdvantageEstimator)
def test_advantages_of_an_empty_batch(cls):
    estimator: AdvantageEstimator = make(cls)
    nobody = torch.zeros(0, dtype=torch.int64)
    assert estimator(torch.zeros(0), nobody).shape == (0,)
    for steps in (None, SegmentRewards(nobody, nobody, torch.zeros(0, dtype=torch.float64))):
        none = torch.zeros(1, 0, dtype=torch.float64)
        batch = RewardBatch(none, torch.ones(1, dtype=torch.float64), nobody, nobody, [steps])
        result = estimator.per_token(batch)
        assert (result.shape, result.dtype) == ((0,), torch.float32)


@each(AdvantageEstimator)
def test_a_step_in_which_every_reward_failed_has_no_advantage(cls):
    estimator: AdvantageEstimator = make(cls)
    failed = torch.full((2, 4), math.nan, dtype=torch.float64)
    lengths = torch.tensor([2, 1, 3, 2])
    # A reward that raises on every completion has no segments, whatever it has on others.
    batch = RewardBatch(failed, torch.ones(2, dtype=torch.float64), torch.tensor([0, 0, 1, 1]), lengths, [None, None])
    assert estimator.per_token(batch).tolist() == [0.0] * 8


@each(AdvantageEstimator)
@pytest.mark.parametrize("seed", range(2))
def test_every_token_has_the_advantage_of_its_completion(cls, seed):
    estimator: AdvantageEstimator = make(cls)
    reward, group = random_rewards(seed)
    reward[::5] = math.nan
    lengths = torch.tensor([1 + i % 4 for i in range(len(reward))])
    steps = None
    if cls.__name__ == "ProcessSupervision":  # One step that ends with the completion.
        steps = SegmentRewards(torch.arange(len(reward)), lengths - 1, reward)
    batch = RewardBatch(reward[None], torch.ones(1, dtype=torch.float64), group, lengths, [steps])
    result = estimator.per_token(batch)
    assert result.isfinite().all()
    close(result, per_element(estimator(reward, group), lengths))


# Surrogates

every_surrogate = pytest.mark.parametrize("name", SURROGATES)


def prepared(name: str, seed: int, spread_of_ratio: float = 0.3) -> tuple[Surrogate, Rollouts, Tensor]:
    """A surrogate, rollouts it has seen, and log π_θ a little away from log π_old."""
    surrogate, rollouts = SURROGATES[name](), branching_rollouts(seed)
    rollouts.add_columns(surrogate.prepare(rollouts))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rollouts.num_tokens, generator=generator)
    assert rollouts.old_logp is not None
    return surrogate, rollouts, (rollouts.old_logp + spread_of_ratio * noise).clamp(max=0)


def evaluate(surrogate: Surrogate, logp: Tensor, rollouts: Rollouts) -> tuple[SurrogateResult, Tensor]:
    assert rollouts.old_logp is not None
    return value_and_gradient(surrogate, logp, rollouts.old_logp, rollouts)


@every_surrogate
@pytest.mark.parametrize("seed", range(2))
def test_surrogates_give_float32_values_and_flags_that_exclude_each_other(name, seed):
    surrogate, rollouts, logp = prepared(name, seed)
    result, gradient = evaluate(surrogate, logp, rollouts)
    shape = rollouts.token_ids.shape
    assert (result.value.shape, result.value.dtype, gradient.dtype) == (shape, torch.float32, torch.float32)
    assert result.value.isfinite().all()
    assert gradient.isfinite().all()
    flags = [result.clipped_low, result.clipped_high, result.unreachable]
    assert all((flag.shape, flag.dtype) == (shape, torch.bool) for flag in flags)
    # A token is counted once, and only if it pushes.
    assert int(sum(flag.int() for flag in flags).max()) <= 1
    assert not any((flag & (rollouts.advantage == 0)).any() for flag in flags)


@every_surrogate
def test_the_gradient_of_a_surrogate_flows_only_through_logp(name):
    surrogate, rollouts, logp = prepared(name, 0)
    assert rollouts.old_logp is not None
    assert not surrogate(logp, rollouts.old_logp, rollouts).value.requires_grad
    logp.requires_grad_()
    surrogate(logp, rollouts.old_logp, rollouts).value.sum().backward()
    assert logp.grad is not None and (logp.grad != 0).any()
    tensors = [value for value in vars(rollouts).values() if isinstance(value, torch.Tensor)]
    assert all(value.grad is None for value in tensors)


@every_surrogate
@pytest.mark.parametrize("seed", range(2))
def test_a_completion_without_advantage_has_value_and_gradient_zero(name, seed):
    surrogate, rollouts, logp = prepared(name, seed, spread_of_ratio=2.0)
    result, gradient = evaluate(surrogate, logp, rollouts)
    idle = rollouts.advantage == 0
    if surrogate.moves_without_advantage:
        assert gradient[idle].all() or name == "CHORD"  # it moves demonstrations; here are none
        return
    assert 0 < int(idle.sum()) < len(idle)
    assert not result.value[idle].any()
    assert not gradient[idle].any()


@every_surrogate
def test_a_rank_without_completions_prepares_too(name):
    nobody = branching_rollouts(0).select(torch.zeros(0, dtype=torch.int64))
    columns = SURROGATES[name]().prepare(nobody)
    assert all(values.shape == (0,) and values.dtype == torch.float32 for values in columns.values())


@every_surrogate
@pytest.mark.parametrize("seed", range(2))
def test_values_do_not_depend_on_order_or_micro_batch(name, seed):
    surrogate, rollouts, logp = prepared(name, seed)
    whole, gradient = evaluate(surrogate, logp, rollouts)
    order = shuffled(len(rollouts), seed)
    for rows in (order, order[:1], order[1:6], order[6:]):
        tokens = positions_of(rows, rollouts.lengths)
        part, part_gradient = evaluate(surrogate, logp[tokens], rollouts.select(torch.tensor(rows)))
        close(part.value, whole.value[tokens])
        close(part_gradient, gradient[tokens])
        for flag in ("clipped_low", "clipped_high", "unreachable"):
            assert getattr(part, flag).equal(getattr(whole, flag)[tokens])


@every_surrogate
@pytest.mark.parametrize("seed", range(2))
def test_where_the_policy_is_the_old_policy_the_gradient_is_the_advantage(name, seed):
    """Token by token; a ratio of the sequence shares it out evenly, so the sum over the completion counts there too."""
    surrogate, rollouts, _ = prepared(name, seed)
    assert rollouts.old_logp is not None
    result, gradient = evaluate(surrogate, rollouts.old_logp, rollouts)
    free = ~(result.clipped_low | result.clipped_high)
    assert int(free.sum()) > 20
    torch.testing.assert_close(gradient[free], rollouts.advantage[free], rtol=1e-5, atol=1e-6)
    assert not gradient[~free].any()


@every_surrogate
@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize(("new", "old"), [(-1e4, 0.0), (-0.1, -1e4), (-1e4, -1e4)])
def test_surrogates_stay_finite_at_absurd_log_ratios(name, advantage, new, old):
    rollouts = branching_rollouts(0)
    rollouts.old_logp = torch.full_like(rollouts.advantage, old)
    rollouts.advantage = torch.full_like(rollouts.advantage, advantage)
    surrogate = SURROGATES[name]()
    rollouts.add_columns(surrogate.prepare(rollouts))
    # Whole completions, and single tokens in completions that are otherwise on policy.
    alone = torch.full_like(rollouts.old_logp, new)
    alone[1::2] = old
    for logp in (torch.full_like(rollouts.old_logp, new), alone):
        result, gradient = evaluate(surrogate, logp, rollouts)
        assert gradient.isfinite().all()
        # The ratio is at most e^20; without one the value is Â log π_θ, or 5 times that. FIPO may count it 1.2 times.
        most = abs(advantage) * math.exp(20) * (1.2 if "FIPO" in name else 1)
        assert float(result.value.detach().abs().max()) <= most * (1 + 1e-5)


# KL estimators

KLS = {cls.__name__: (lambda cls=cls: make(cls)) for cls in members(KLEstimator)}
if ImportanceWeighted := optional("ImportanceWeighted"):
    KLS["ImportanceWeighted K1"] = lambda: ImportanceWeighted(kl.K1())
    KLS["ImportanceWeighted K2"] = lambda: ImportanceWeighted(kl.K2())
every_kl = pytest.mark.parametrize("name", KLS)


def random_logp(seed: int, count: int = 200) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).clamp(min=1e-3).log()


@every_kl
def test_where_policy_and_reference_agree_every_kl_is_zero(name):
    logp = random_logp(0)
    assert not KLS[name]()(logp, logp, random_logp(1)).any()


@every_kl
def test_the_gradient_of_a_kl_flows_only_through_logp(name):
    logp, ref_logp, old_logp = random_logp(0), random_logp(1), random_logp(2)
    assert not KLS[name]()(logp, ref_logp, old_logp).requires_grad
    logp.requires_grad_()
    value = KLS[name]()(logp, ref_logp, old_logp)
    assert (value.shape, value.dtype) == (logp.shape, torch.float32)
    value.sum().backward()
    assert logp.grad is not None and logp.grad.isfinite().all() and (logp.grad != 0).all()
    assert ref_logp.grad is old_logp.grad is None


@every_kl
def test_kls_stay_finite_at_absurd_log_ratios(name):
    extremes = torch.tensor([-1e4, -100.0, -0.1, 0.0])
    logp, ref_logp, old_logp = torch.cartesian_prod(extremes, extremes, extremes).T.contiguous()
    logp.requires_grad_()
    value = KLS[name]()(logp, ref_logp, old_logp)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


# Weightings


def random_batch(seed: int) -> tuple[Tensor, Tensor, BatchSize]:
    """Six groups of four completions of up to 12 tokens, group after group."""
    rng = random.Random(seed)
    lengths = torch.tensor([rng.randrange(1, 13) for _ in range(24)])
    return lengths, torch.arange(24) // 4, BatchSize(num_completions=24, num_groups=6, num_tokens=int(lengths.sum()))


@each(TokenWeighting)
@pytest.mark.parametrize("seed", range(2))
def test_weights_are_positive_and_follow_their_rows(cls, seed):
    weighting: TokenWeighting = make(cls)
    lengths, group, batch = random_batch(seed)
    weight = weighting(lengths, group, batch)
    assert (weight.shape, weight.dtype) == (lengths.shape, torch.float32)
    assert weight.isfinite().all()
    assert (weight > 0).all()
    order = torch.tensor(shuffled(24, seed))
    assert weighting(lengths[order], group[order], batch).equal(weight[order])


@each(TokenWeighting)
@pytest.mark.parametrize("seed", range(2))
def test_whole_groups_have_the_weights_of_the_whole_batch(cls, seed):
    weighting: TokenWeighting = make(cls)
    lengths, group, batch = random_batch(seed)
    is_on_rank = torch.tensor([g in (0, 3, 4) for g in group.tolist()])
    weight = weighting(lengths, group, batch)
    for rows in (is_on_rank, ~is_on_rank):
        # A rank, or a minibatch, numbers its groups from 0.
        renumbered = group[rows].unique(return_inverse=True)[1]
        assert weighting(lengths[rows], renumbered, batch).equal(weight[rows])


# Masks


@each(TokenMask)
@pytest.mark.parametrize("seed", range(2))
def test_masks_do_not_depend_on_the_order_of_rows(cls, seed):
    mask: TokenMask = make(cls)
    rollouts = branching_rollouts(seed)
    stays = mask(rollouts)
    assert stays.shape == rollouts.token_ids.shape and stays.dtype in (torch.bool, torch.float32)
    assert 0 < int((stays != 0).sum()) < rollouts.num_tokens and (stays >= 0).all()
    order = shuffled(len(rollouts), seed)
    for rows in (order, order[:5]):
        assert mask(rollouts.select(torch.tensor(rows))).equal(stays[positions_of(rows, rollouts.lengths)])


# Entropy bonuses


@each(EntropyBonus)
def test_an_entropy_bonus_is_not_negative_and_goes_on_from_its_state(cls):
    bonus: EntropyBonus = make(cls)
    rng = random.Random(0)
    entropies = [rng.random() for _ in range(12)]
    for entropy in entropies[:6]:
        assert bonus.coefficient >= 0
        bonus.observe(entropy)
    resumed: EntropyBonus = make(cls)
    resumed.load_state_dict(bonus.state_dict())
    for entropy in entropies[6:]:
        assert resumed.coefficient == bonus.coefficient
        resumed.observe(entropy)
        bonus.observe(entropy)


# Stop rules


def random_updates(seed: int) -> list[Diagnostics]:
    rng = random.Random(seed)
    updates = []
    for _ in range(8):
        numbers = {name: rng.random() for name in Diagnostics.__dataclass_fields__}
        numbers |= {"tokens": 40.0, "has_advantage": 2.0}
        updates.append(Diagnostics(**{name: torch.tensor(value) for name, value in numbers.items()}))
    return updates


@each(StopRule)
@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_a_stop_rule_remembers_nothing(cls, num_minibatches, seed):
    rule: StopRule = make(cls)
    updates = random_updates(seed)
    updates_before = copy.deepcopy(updates)
    verdicts = [rule(updates[:count], num_minibatches) for count in range(2, 9)]
    reversed_verdicts = [rule(updates[:count], num_minibatches) for count in range(8, 1, -1)]
    assert verdicts == reversed_verdicts[::-1]
    assert all(isinstance(stops, bool) for stops in verdicts)
    assert updates == updates_before


# Mistakes

MISTAKES = (  # noqa: SIM905
    "GroupStd(advantage_eps=-1e-06); BatchStd(advantage_eps=-0.5); PerRewardStd(advantage_eps=-0.5); "
    "ProcessSupervision(advantage_eps=-0.5); Sign(dead_zone=-0.1); Clipped(clip_low=-0.1); Clipped(clip_low=1.5); "
    "Clipped(clip_high=-0.2); Clipped(clip_low=nan); Clipped(dual_clip=1.0); Clipped(clip_high=None, dual_clip=0.5); "
    "SequenceClipped(clip_low=-0.0003); SequenceClippedToken(clip_high=-1.0); CISPO(clip_high=-1.0); "
    "SAPO(tau_good=0.0); SAPO(tau_bad=-1.0); GMPO(log_clip=0.0); OffPolicyMask(threshold=-0.1); "
    "VESPO(k_bad=0.0); DPPO(low=0.0, high=0.1); DPPO(cap=0.5); "
    "AdaptiveEntropy(target=0.0); AdaptiveEntropy(delta=0.0); "
    "TargetProbability(good_exponent=1.5); TargetProbability(good_exponent=-0.5); TargetProbability(bad_exponent=0.5); "
    "TargetProbability(tolerance=-0.1); KLPenalty(beta=0.0); KLPenalty(beta=-1.0); FixedLength(length=0); "
    "FullVocabulary(top_k=0); FullVocabulary(temperature=0.0); FullVocabulary(mixture=1.0); "
    "TopEntropy(fraction=0.0); TopEntropy(fraction=1.5); Objective(beta=-0.04); FixedEntropy(coefficient=0.0); "
    "AllConverged(fraction=0.0); AllConverged(fraction=1.1); ObjectivePlateau(patience=0); "
    "ObjectivePlateau(min_delta=-1.0); KLAbove(target=0.0); TruncatedRatio(cap=0.5); "
    "TruncatedRatio(cap=nan); RatioMask(low=1.1); RatioMask(low=-0.1); RatioMask(high=0.9); SequenceMask(high=inf); "
    "GeometricMask(high=1.02, low=1.01); ProbabilityGap(threshold=0.0); ProbabilityGap(threshold=1.5)"
).split("; ")


@pytest.mark.parametrize("mistake", [one for one in MISTAKES if optional(one.partition("(")[0])])
def test_a_mistake_is_refused_by_key_and_value(mistake):
    name, _, options = mistake.removesuffix(")").partition("(")
    with pytest.raises(UsageError) as caught:
        eval(mistake, {name: getattr(grpo_lightning, name), "nan": math.nan, "inf": math.inf})
    assert options.rpartition(", ")[2] in str(caught.value)
