"""Context tokens inside a completion: the model sees them, no formula does.

The reference is the padded batch of padded_loop.py.
"""

from itertools import cycle

import pytest
import torch
from helpers.contracts import members
from helpers.fitting import relative
from helpers.tiny import COMPUTES, gradients, policy_of
from padded_loop import SURROGATES, WEIGHTINGS, Padded, random_fields, reference
from torch import Tensor

from grpo_lightning import BatchSize, Diagnostics, Objective, Policy, Rollouts, Surrogate, TokenWeighting
from grpo_lightning.command.overview import optional
from grpo_lightning.maths import surrogates, weightings
from grpo_lightning.maths.entropy import FixedEntropy
from grpo_lightning.policy.architecture import Head

PROMPTS = [[10, 11, 12], [13]]
GROUP = [0, 0, 0, 1, 1, 0, 1]
# Two rows are pieces of one completion.
COMPLETION = [0, 1, 2, 3, 3, 4, 5]
# Negative: context. The first two share a prefix with its context, the third differs from them in the context alone.
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
SAMPLED = [[token > 0 for token in row] for row in TOKENS]
NUM_SAMPLED = sum(map(sum, SAMPLED))
SHARES = [True, False][-len(COMPUTES) :]
"""Whether prefixes are shared, which a plugin does."""
TEMPERATURE, BETA, BONUS = 0.7, 0.1, 0.05


def conversation() -> Rollouts:
    rollouts = Rollouts.from_lists(PROMPTS, GROUP, COMPLETIONS, SAMPLED, sample_index=torch.tensor(COMPLETION))
    rollouts.temperature = TEMPERATURE
    return rollouts


def padded() -> Padded:
    rows = [PROMPTS[group] + token_ids for group, token_ids in zip(GROUP, COMPLETIONS, strict=True)]
    flags = [[False] * len(PROMPTS[group]) + is_sampled for group, is_sampled in zip(GROUP, SAMPLED, strict=True)]
    return Padded(rows, flags, GROUP, COMPLETION, TEMPERATURE)


SIZE = BatchSize(num_completions=6, num_groups=2, num_tokens=NUM_SAMPLED)


def results(
    policy: Policy, micro_batches: list[Rollouts], objective: Objective
) -> tuple[list[Tensor], float, dict[str, Tensor], list[Diagnostics]]:
    """The log π_θ of each micro-batch; J, its gradient and its diagnostics."""
    policy.zero_grad()
    logps, total, diagnostics = [], 0.0, []
    for micro_batch in micro_batches:
        scored = policy(micro_batch, entropy_gradient=True)
        value, micro_batch_diagnostics = objective(scored.logp, scored.entropy, micro_batch)
        value.backward()
        logps.append(scored.logp.detach())
        diagnostics.append(micro_batch_diagnostics)
        total += float(value.detach())
    return logps, total, dict(gradients(policy)), diagnostics


def prepared(policy: Policy, surrogate: Surrogate, weighting: TokenWeighting) -> tuple[Rollouts, Objective]:
    rollouts = conversation()
    random_fields(rollouts, policy, padded())
    objective = Objective(surrogate, beta=BETA, weighting=weighting, entropy=FixedEntropy(BONUS))
    rollouts.add_columns(surrogate.prepare(rollouts))
    rollouts.weight = objective.token_weight(rollouts, SIZE)
    return rollouts, objective


def policy_with(shares: bool, shape: str = "llama") -> Policy:
    policy = policy_of(shape, scale=0.1, compute=COMPUTES[0])
    assert policy.compute.shares_prefix is SHARES[0]
    policy.compute.shares_prefix = shares and SHARES[0]
    return policy


shared_and_not = pytest.mark.parametrize("shares", SHARES, ids=lambda shares: "shared prefix" if shares else "rows")


def test_every_surrogate_and_weighting_has_a_loop() -> None:
    of_demonstrations = {optional("CHORD"), optional("LUFFY")}  # a loop of theirs decides
    assert SURROGATES.keys() == set(members(Surrogate)) - of_demonstrations
    assert WEIGHTINGS.keys() == set(members(TokenWeighting))
    assert len(SURROGATES) >= len(WEIGHTINGS)


COMBINED = list(
    zip(SURROGATES, cycle(WEIGHTINGS), cycle(["llama", "gpt2", "qwen3"]), cycle([True, True, False, False]))
)
"""Every surrogate, and every weighting and architecture with some of them."""


@pytest.mark.parametrize(("surrogate", "weighting", "shape", "shares"), COMBINED)
def test_objective_and_gradient_are_those_of_a_masked_padded_loop(
    surrogate: type[Surrogate], weighting: type[TokenWeighting], shape: str, shares: bool
) -> None:
    policy = policy_with(shares, shape)
    (member, loop), (weighting_member, weight) = SURROGATES[surrogate], WEIGHTINGS[weighting]
    rollouts, objective = prepared(policy, member, weighting_member)
    logp, value, gradient = reference(policy, rollouts, padded(), loop, weight, BETA, BONUS)
    (actual,), total, actual_gradient, _ = results(policy, [rollouts], objective)
    torch.testing.assert_close(actual.double(), logp, atol=5e-6, rtol=0)
    assert total == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert relative(actual_gradient, gradient) < 1e-5


def test_the_bounds_hold_some_tokens_and_not_others() -> None:
    """Else the comparison above would say little about them."""
    policy = policy_with(True)
    for cls, (member, _) in SURROGATES.items():
        if cls in (surrogates.Reinforce, optional("SAPO"), optional("VESPO")):
            continue
        rollouts, objective = prepared(policy, member, weightings.Unweighted())
        (diagnostics,) = results(policy, [rollouts], objective)[3]
        num_clipped = float(diagnostics.clipped_low + diagnostics.clipped_high)
        assert 0 < num_clipped < float(diagnostics.has_advantage), cls.__name__


@shared_and_not
def test_packing_padding_and_order_do_not_change_the_gradient(shares: bool) -> None:
    policy = policy_with(shares)
    rollouts, objective = prepared(policy, SURROGATES[surrogates.Clipped][0], weightings.TokenMean())
    _, total, whole, _ = results(policy, [rollouts], objective)
    order = torch.tensor([4, 0, 6, 5, 2, 1, 3])
    half = [rollouts.select(order[:3]), rollouts.select(order[3:])]
    for micro_batches in (
        [rollouts.select(order)],
        half,
        [Rollouts.concat(half)],
        rollouts.micro_batches(1, shares),
        rollouts.micro_batches(24, shares),
    ):
        _, value, gradient, _ = results(policy, micro_batches, objective)
        assert value == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert relative(gradient, whole) < 2e-6
    assert len(rollouts.micro_batches(24, shares)) > 1


def test_only_sampled_tokens_have_weight_length_logits_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_with(True)
    rollouts, objective = prepared(policy, surrogates.Clipped(), weightings.SequenceMean())
    assert rollouts.lengths.tolist() == [*map(sum, SAMPLED)]
    # 1 / (B |o_i|): the weights of a completion sum to 1 / B.
    sums = torch.zeros(6).index_add(0, rollouts.per_token(rollouts.sample_index), rollouts.weight)
    assert sums.tolist() == pytest.approx([1 / 6] * 6)
    heads = []
    policy.compute.fused = False
    logits = Head.__call__
    monkeypatch.setattr(Head, "__call__", lambda self, hidden: heads.append(len(hidden)) or logits(self, hidden))
    (diagnostics,) = results(policy, [rollouts], objective)[3]
    assert heads == [NUM_SAMPLED]
    assert float(diagnostics.tokens) == NUM_SAMPLED
