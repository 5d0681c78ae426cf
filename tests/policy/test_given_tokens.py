"""Tokens that somebody else wrote inside a completion: the model sees them, no formula does.

The reference is a padded batch in float64 with a loss mask, written from the papers and by itself.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from helpers.contracts import members
from helpers.fitting import relative
from helpers.other_device import other_device
from helpers.tiny import gradients, policy_of, rollouts_of
from torch import Tensor

from grpo_lightning.maths import sequence_surrogates, surrogates, target_probability, weightings
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.surrogates import Surrogate
from grpo_lightning.maths.weightings import BatchSize, TokenWeighting
from grpo_lightning.policy.policy import Policy

PROMPTS = [[10, 11, 12], [13]]
GROUP = [0, 0, 0, 1, 1, 0, 1]
# Negative: given. The first two share a prefix with its context, the third differs from them in the context alone.
TOKENS = [
    [20, -30, -31, 21, 22],
    [20, -30, -31, 21, 23, -40, -41],
    [20, -32, -31, 21, 22],
    [-33, 20, 24],
    [20, 24, 25, 3],
    [20, -30, 21, -35, -36, 22, -37, 3],
    [20],
]
COMPLETIONS = [[abs(token) for token in row] for row in TOKENS]
DRAWN = [[token > 0 for token in row] for row in TOKENS]
NUM_DRAWN = sum(sum(row) for row in DRAWN)
TEMPERATURE, BETA, BONUS = 0.7, 0.1, 0.05


def conversation() -> Rollouts:
    rollouts = Rollouts.from_lists(PROMPTS, GROUP, COMPLETIONS, DRAWN)
    rollouts.temperature = TEMPERATURE
    return rollouts


class Padded:
    """[B, T] prompt and completion of each row, padded on the right, and the loss mask."""

    def __init__(self) -> None:
        rows = [PROMPTS[group] + own for group, own in zip(GROUP, COMPLETIONS, strict=True)]
        self.ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        self.mask = torch.zeros(self.ids.shape, dtype=torch.bool)
        for row, (tokens, flags) in enumerate(zip(rows, DRAWN, strict=True)):
            self.ids[row, : len(tokens)] = torch.tensor(tokens)
            self.mask[row, len(tokens) - len(flags) : len(tokens)] = torch.tensor(flags)

    def pad(self, values: Tensor) -> Tensor:
        """[N] float32 -> [B, T] float64."""
        padded = torch.zeros(self.ids.shape, dtype=torch.float64)
        padded[self.mask] = values.double()
        return padded

    def score(self, policy: Policy) -> tuple[Tensor, Tensor]:
        """[B, T] log-prob of each token and entropy of its distribution, with gradient."""
        logits = policy.model(input_ids=self.ids, use_cache=False).logits / TEMPERATURE
        distribution = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], dim=1).log_softmax(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, self.ids[..., None]).squeeze(-1), entropy

    def prefix(self, row: int, position: int) -> tuple[int, ...]:
        return (GROUP[row], *self.ids[row, : position + 1].tolist())


def double(policy: Policy) -> Policy:
    twin = copy.deepcopy(policy)
    twin.model.set_attn_implementation("eager")
    return twin.double()


def random_fields(rollouts: Rollouts, policy: Policy) -> None:
    """π_old and π_ref a little away from π_θ, by functions of the prefix, and advantages that differ by token."""
    padded = Padded()
    with torch.no_grad():
        logp = padded.score(double(policy))[0]
    noise = torch.zeros_like(logp)
    for row, position in padded.mask.nonzero().tolist():
        noise[row, position] = math.sin(sum((i + 1) * token for i, token in enumerate(padded.prefix(row, position))))
    rollouts.old_logp = (logp + 0.4 * noise)[padded.mask].clamp(max=-0.01).float()
    rollouts.ref_logp = (logp + 0.3 * noise.square())[padded.mask].clamp(max=-0.01).float()
    rollouts.advantage = torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(1))
    rollouts.advantage[4] = 0.0


# The surrogates: values [B, T] from log π_θ, log π_old, Â and the loss mask, all [B, T].


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] over the drawn tokens of each row."""
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def reinforce(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return advantage * logp


def ppo(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return clip((logp - old).exp(), advantage, 0.2, 0.1)


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return (logp - old).exp().clamp(max=1.1).detach() * advantage * logp


def sapo(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    tau = torch.where(advantage > 0, 1.0, 1.05).double()
    return advantage * torch.sigmoid(tau * ((logp - old).exp() - 1)) * 4 / tau


def gspo(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return clip(mean(logp - old, mask).exp(), advantage, 0.1, 0.05)


def gspo_token(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    ratio = mean(logp - old, mask).exp().detach() * (logp - logp.detach()).exp()
    return clip(ratio, advantage, 0.1, 0.05)


def gmpo(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    good, bad = (mean(d, mask).exp() for d in ((logp - old).clamp(max=0.2), (logp - old).clamp(min=-0.2)))
    return torch.where(advantage > 0, good, bad) * advantage


def off_policy(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    away = mean(old - logp.detach(), mask)
    return torch.where((away > 0.05) & (advantage < 0), 0.0, clip((logp - old).exp(), advantage, 0.2, 0.2))


def targets(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    padded = Padded()
    net: dict[tuple[int, ...], float] = defaultdict(float)
    probability: dict[tuple[int, ...], float] = {}
    for row, position in mask.nonzero().tolist():
        path = padded.prefix(row, position)
        net[path] += float(advantage[row, position])
        probability[path] = math.exp(float(old[row, position]))
    target = {path: p ** (0.97 if net[path] > 0 else 1.03 if net[path] < 0 else 1) for path, p in probability.items()}
    tried: dict[tuple[int, ...], float] = defaultdict(float)
    for path, p in target.items():
        tried[path[:-1]] += p
    values = torch.zeros_like(logp)
    for row, position in mask.nonzero().tolist():
        path = padded.prefix(row, position)
        bound = math.log(target[path] / max(1, tried[path[:-1]]))
        own = logp[row, position]
        held = (net[path] >= 0 and float(own.detach()) >= bound) or (net[path] <= 0 and float(own.detach()) <= bound)
        values[row, position] = advantage[row, position] * (bound if held else own)
    return values


Loop = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SURROGATES: dict[type[Surrogate], tuple[Surrogate, Loop]] = {
    surrogates.Reinforce: (surrogates.Reinforce(), reinforce),
    surrogates.Clipped: (surrogates.Clipped(0.2, 0.1), ppo),
    surrogates.CISPO: (surrogates.CISPO(None, 0.1), cispo),
    surrogates.SAPO: (surrogates.SAPO(), sapo),
    sequence_surrogates.SequenceClipped: (sequence_surrogates.SequenceClipped(0.1, 0.05), gspo),
    sequence_surrogates.SequenceClippedToken: (sequence_surrogates.SequenceClippedToken(0.1, 0.05), gspo_token),
    sequence_surrogates.GMPO: (sequence_surrogates.GMPO(0.2), gmpo),
    sequence_surrogates.OffPolicyMask: (sequence_surrogates.OffPolicyMask(threshold=0.05), off_policy),
    target_probability.TargetProbability: (target_probability.TargetProbability(0.97, 1.03), targets),
}


def of_group(mask: Tensor) -> Tensor:
    """[B] drawn tokens of each row's group."""
    group = torch.tensor(GROUP)
    return torch.stack([mask[group == own].sum() for own in group])


WEIGHTINGS: dict[type[TokenWeighting], tuple[TokenWeighting, Callable[[Tensor], Tensor]]] = {
    weightings.SequenceMean: (weightings.SequenceMean(), lambda mask: 1 / (len(mask) * mask.sum(1))),
    weightings.TokenMean: (weightings.TokenMean(), lambda mask: torch.ones(len(mask)) / mask.sum()),
    weightings.FixedLength: (weightings.FixedLength(9), lambda mask: torch.ones(len(mask)) / (9 * len(mask))),
    weightings.GroupTokenMean: (weightings.GroupTokenMean(), lambda mask: 1 / (2 * of_group(mask))),
    weightings.Unweighted: (weightings.Unweighted(), lambda mask: torch.ones(len(mask))),
}
SIZE = BatchSize(num_completions=len(TOKENS), num_groups=2, num_tokens=NUM_DRAWN)


def reference(
    policy: Policy, rollouts: Rollouts, loop: Loop, weight: Callable[[Tensor], Tensor], mask: Tensor | None = None
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """[N] log π_θ, J and its gradient, in float64. Another `mask` than the loss mask is a mistake to be seen."""
    twin, padded = double(policy), Padded()
    twin.zero_grad()
    mask = padded.mask if mask is None else mask
    logp, entropy = padded.score(twin)
    old, ref, advantage = (padded.pad(v) for v in (rollouts.old_logp, rollouts.ref_logp, rollouts.advantage))
    kl = (ref - logp).exp() - (ref - logp) - 1
    value = loop(logp, old, advantage, mask) - BETA * kl + BONUS * entropy
    objective = torch.where(mask, weight(mask).double()[:, None] * value, 0.0).sum()
    objective.backward()
    return logp[padded.mask].detach(), float(objective.detach()), dict(gradients(twin))


def found(
    policy: Policy, packs: list[Rollouts], objective: Objective
) -> tuple[list[Tensor], float, dict[str, Tensor], list[Diagnostics]]:
    """The log π_θ of each pack; J, its gradient and its diagnostics."""
    policy.zero_grad()
    logps, total, diagnostics = [], 0.0, []
    for pack in packs:
        scored = policy(pack, entropy_gradient=True)
        value, seen = objective(scored.logp, scored.entropy, pack)
        value.backward()
        logps.append(scored.logp.detach())
        diagnostics.append(seen)
        total += float(value.detach())
    return logps, total, dict(gradients(policy)), diagnostics


def prepared(policy: Policy, surrogate: Surrogate, weighting: TokenWeighting) -> tuple[Rollouts, Objective]:
    rollouts = conversation()
    random_fields(rollouts, policy)
    objective = Objective(surrogate, beta=BETA, weighting=weighting, entropy_bonus=BONUS)
    rollouts.add_columns(surrogate.prepare(rollouts))
    rollouts.weight = objective.token_weight(rollouts, SIZE)
    return rollouts, objective


def policy_with(shares: bool, shape: str = "llama") -> Policy:
    policy = policy_of(shape, scale=0.1)
    assert policy.shares_prefix
    policy.shares_prefix = shares
    return policy


shared_and_not = pytest.mark.parametrize("shares", [True, False], ids=["shared prefix", "rows"])


def test_every_surrogate_and_weighting_has_a_loop() -> None:
    assert SURROGATES.keys() == set(members(Surrogate))
    assert WEIGHTINGS.keys() == set(members(TokenWeighting))


@shared_and_not
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda cls: cls.__name__)
def test_log_probs_objective_and_gradient_are_those_of_a_padded_loop_with_a_loss_mask(
    surrogate: type[Surrogate], weighting: type[TokenWeighting], shares: bool
) -> None:
    policy = policy_with(shares)
    (member, loop), (own, weight) = SURROGATES[surrogate], WEIGHTINGS[weighting]
    rollouts, objective = prepared(policy, member, own)
    logp, value, gradient = reference(policy, rollouts, loop, weight)
    (actual,), total, actual_gradient, _ = found(policy, [rollouts], objective)
    torch.testing.assert_close(actual.double(), logp, atol=5e-6, rtol=0)
    assert total == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert relative(actual_gradient, gradient) < 1e-5


@shared_and_not
@pytest.mark.parametrize("shape", ["qwen3", "gpt2"])
def test_other_architectures_see_given_tokens_where_they_are(shape: str, shares: bool) -> None:
    policy = policy_with(shares, shape)
    rollouts, objective = prepared(policy, surrogates.Clipped(0.2, 0.1), weightings.SequenceMean())
    logp, value, gradient = reference(policy, rollouts, ppo, WEIGHTINGS[weightings.SequenceMean][1])
    (actual,), total, actual_gradient, _ = found(policy, [rollouts], objective)
    torch.testing.assert_close(actual.double(), logp, atol=5e-6, rtol=0)
    assert total == pytest.approx(value, rel=1e-5)
    assert relative(actual_gradient, gradient) < 1e-5


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda cls: cls.__name__)
def test_the_loop_sees_a_forgotten_mask(surrogate: type[Surrogate]) -> None:
    policy = policy_with(True)
    member, loop = SURROGATES[surrogate]
    weighting, weight = WEIGHTINGS[weightings.SequenceMean]
    rollouts, _ = prepared(policy, member, weighting)
    everything = torch.zeros_like(Padded().mask)
    for row, own in enumerate(COMPLETIONS):
        everything[row, len(PROMPTS[GROUP[row]]) :][: len(own)] = True
    _, _, right = reference(policy, rollouts, loop, weight)
    _, _, wrong = reference(policy, rollouts, loop, weight, everything)
    assert relative(wrong, right) > 0.01


def test_the_bounds_hold_some_tokens_and_not_others() -> None:
    """Else the comparison above would say little about them."""
    policy = policy_with(True)
    for cls, (member, _) in SURROGATES.items():
        if cls in (surrogates.Reinforce, surrogates.SAPO):
            continue
        rollouts, objective = prepared(policy, member, weightings.Unweighted())
        (seen,) = found(policy, [rollouts], objective)[3]
        assert 0 < float(seen.clipped_low + seen.clipped_high) < float(seen.pushing), cls.__name__


@shared_and_not
@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda cls: cls.__name__)
def test_packing_padding_and_order_do_not_change_the_gradient(surrogate: type[Surrogate], shares: bool) -> None:
    policy = policy_with(shares)
    rollouts, objective = prepared(policy, SURROGATES[surrogate][0], weightings.TokenMean())
    _, total, whole, _ = found(policy, [rollouts], objective)
    order = torch.tensor([4, 0, 6, 5, 2, 1, 3])
    half = [rollouts.select(order[:3]), rollouts.select(order[3:])]
    for packs in (
        [rollouts.select(order)],
        half,
        [Rollouts.concat(half)],
        rollouts.packs(1, shares),
        rollouts.packs(24, shares),
    ):
        _, value, gradient, _ = found(policy, packs, objective)
        assert value == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert relative(gradient, whole) < 2e-6
    assert len(rollouts.packs(24, shares)) > 1


@shared_and_not
def test_a_given_token_changes_the_log_probs_of_later_drawn_tokens_of_its_completion(shares: bool) -> None:
    policy = policy_with(shares)
    before = policy(conversation()).logp.detach().split([sum(flags) for flags in DRAWN])
    rollouts = conversation()
    # The 35 of the sixth completion, after two drawn tokens: 20 and 21.
    assert rollouts.context_ids is not None
    (index,) = (rollouts.context_ids == 35).nonzero()
    rollouts.context_ids[index] = 50
    after = policy(rollouts).logp.detach().split([sum(flags) for flags in DRAWN])
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        if row != 5:
            torch.testing.assert_close(new, old, atol=1e-6, rtol=0)
    torch.testing.assert_close(after[5][:2], before[5][:2], atol=1e-6, rtol=0)
    assert (after[5][2:] - before[5][2:]).abs().min() > 1e-4


@shared_and_not
def test_what_is_given_after_the_last_drawn_token_changes_nothing(shares: bool) -> None:
    policy = policy_with(shares)
    cut = [own[: max(i for i, flag in enumerate(flags) if flag) + 1] for own, flags in zip(TOKENS, DRAWN, strict=True)]
    assert cut != TOKENS
    shorter = Rollouts.from_lists(
        PROMPTS, GROUP, [[abs(t) for t in own] for own in cut], [[t > 0 for t in own] for own in cut]
    )
    shorter.temperature = TEMPERATURE
    torch.testing.assert_close(policy(shorter).logp, policy(conversation()).logp, atol=1e-6, rtol=0)


def test_only_drawn_tokens_have_weight_length_logits_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_with(True)
    rollouts, objective = prepared(policy, surrogates.Clipped(), weightings.SequenceMean())
    assert rollouts.lengths.tolist() == [sum(flags) for flags in DRAWN]
    # 1 / (B |o_i|): the weights of a completion sum to 1 / B.
    assert [float(own.sum()) for own in rollouts.weight.split(rollouts.lengths.tolist())] == pytest.approx([1 / 7] * 7)
    heads = []
    policy.fused = False
    logits = Policy.logits
    monkeypatch.setattr(Policy, "logits", lambda self, hidden: heads.append(len(hidden)) or logits(self, hidden))
    (seen,) = found(policy, [rollouts], objective)[3]
    assert heads == [NUM_DRAWN]
    assert float(seen.tokens) == NUM_DRAWN


@shared_and_not
def test_context_costs_no_further_wait_for_the_device(shares: bool) -> None:
    policy = policy_with(shares)
    waits = []
    with other_device() as other:
        policy.to(other.device)
        for given in (0.0, 1.0):
            rollouts = rollouts_of([4, 9, 1, 6], [3, 5], given=given).to(other.device)
            other.syncs.clear()
            policy(rollouts)
            layout = rollouts.layout
            other.syncs.clear()
            policy(rollouts)
            assert rollouts.layout is layout
            waits.append(len(other.syncs))
    assert waits[1] == waits[0]
