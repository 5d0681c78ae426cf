"""The gradient over conversations is that of a padded loop in float64 with a loss mask, pieces and all."""

import statistics
from itertools import cycle

import pytest
import torch
from helpers.fitting import relative
from helpers.games import explore, player
from helpers.guessing import REWRITES
from helpers.padded_loop import SURROGATES, WEIGHTINGS, Padded, random_fields, reference
from helpers.tiny import gradients

from grpo_lightning import BatchSize, FixedEntropy, GroupMean, Objective, Policy, Rollouts, Surrogate, TokenWeighting

BETA, BONUS = 0.1, 0.05


@pytest.fixture(scope="module")
def policy() -> Policy:
    return player()


@pytest.fixture(scope="module")
def explored(policy: Policy) -> tuple[Rollouts, Padded]:
    """Rollouts of two groups with old policy, reference and advantages, and the same from the conversations alone."""
    _, exploration = explore(policy, REWRITES)
    talks = [sample.conversation for sample in exploration.samples]
    assert [len(talk.pieces) for talk in talks] == [2, 1, 2, 2, 2, 2]
    pieces = [(number, piece) for number, talk in enumerate(talks) for piece in talk.pieces]
    padded = Padded(
        [piece.token_ids for _, piece in pieces],
        [piece.drawn for _, piece in pieces],
        [number // 3 for number, _ in pieces],
        [number for number, _ in pieces],
    )
    rollouts = exploration.rollouts
    random_fields(rollouts, policy, padded)
    rollouts.advantage = GroupMean().per_token(exploration.rewards)
    totals = [sum(talk.rewards) for talk in talks]
    means = [statistics.fmean(totals[first : first + 3]) for first in (0, 3)]
    expected = [totals[number] - means[number // 3] for number, piece in pieces for own in piece.drawn if own]
    assert rollouts.advantage.tolist() == pytest.approx(expected)
    return rollouts, padded


COMBINED = list(zip(SURROGATES, cycle(WEIGHTINGS), cycle([True, False])))
"""Every surrogate, and every weighting and layout with some of them."""


@pytest.mark.parametrize(("surrogate", "weighting", "shares"), COMBINED)
def test_the_gradient_is_that_of_a_padded_loop_with_a_loss_mask(
    policy: Policy,
    explored: tuple[Rollouts, Padded],
    surrogate: type[Surrogate],
    weighting: type[TokenWeighting],
    shares: bool,
) -> None:
    (rollouts, padded), (member, loop), (own, weight) = explored, SURROGATES[surrogate], WEIGHTINGS[weighting]
    logp, value, gradient = reference(policy, rollouts, padded, loop, weight, BETA, BONUS)
    objective = Objective(member, beta=BETA, weighting=own, entropy=FixedEntropy(BONUS))
    policy.compute.shares_prefix = shares
    for max_tokens in (0, 60):
        pieces = rollouts.select(torch.arange(len(rollouts)))
        pieces.add_columns(member.prepare(pieces))
        pieces.weight = objective.token_weight(pieces, BatchSize(6, 2, pieces.num_tokens))
        policy.zero_grad()
        torch.testing.assert_close(policy(pieces).logp.detach().double(), logp, atol=5e-6, rtol=0)
        total, packs = 0.0, pieces.packs(max_tokens, shares)
        for pack in packs:
            scored = policy(pack, entropy_gradient=True)
            found, _ = objective(scored.logp, scored.entropy, pack)
            found.backward()
            total += float(found.detach())
        assert len(packs) > 1 or not max_tokens
        assert total == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert relative(dict(gradients(policy)), gradient) < 1e-5
