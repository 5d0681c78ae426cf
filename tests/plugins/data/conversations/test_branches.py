"""A chat template that rewrites history: the pieces of a conversation remain one completion."""

from collections.abc import Iterator
from itertools import compress
from typing import Any

import pytest
import torch
from helpers.contracts import members
from helpers.fast import policy_of
from helpers.games import explore, player
from helpers.guessing import REWRITES

from grpo_lightning import KLPenalty, NoAdvantage, Objective, Parts, Policy, ProcessSupervision, Rollouts, Sampling
from grpo_lightning.grpo.explore import Exploration, Explorer
from grpo_lightning.grpo.prepare import prepare
from grpo_lightning.maths.advantages import AdvantageEstimator, GroupMean
from grpo_lightning.policy.snapshots import FrozenCopy, RecordedLogp

PLAIN = REWRITES.replace("m.content if loop.last else m.content.split('</think>')[-1]", "m.content")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return player()


@pytest.fixture(scope="module")
def both(policy: Policy) -> list[tuple[Explorer, Exploration]]:
    """With pieces, and the same words in one piece."""
    return [explore(policy, template) for template in (REWRITES, PLAIN)]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def prepared(policy: Policy, found: tuple[Explorer, Exploration], **options: Any) -> Rollouts:
    explorer, exploration = found
    settings: dict[str, Any] = {
        "policy": policy,
        "objective": Objective(),
        "advantage": GroupMean(),
        "old_policy": RecordedLogp(),
        "reference": None,
        "explorer": explorer,
        "sampling": Sampling(max_new_tokens=9),
    }
    return prepare(Parts(**settings | options), exploration, 1, 1, 0)[0]


def test_a_piece_begins_with_the_history_as_it_is_now(policy: Policy, both: Any) -> None:
    exploration = both[0][1]
    sample = exploration.samples[0]
    texts = [policy.tokenizer.decode(piece.token_ids) for piece in sample.conversation.pieces]
    assert texts == ["guess:<think>0</think>0<eos>", "guess:0<eos>h:9<eos>"]
    sampled_ids = [[*compress(piece.token_ids, piece.sampled)] for piece in sample.conversation.pieces]
    assert [policy.tokenizer.decode(ids) for ids in sampled_ids] == ["<think>0</think>0<eos>", "9<eos>"]
    assert sampled_ids[0] + sampled_ids[1] == sample.token_ids
    assert exploration.rollouts.sample_index.tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert both[1][1].rollouts.sample_index.tolist() == [0, 1, 2, 3, 4, 5]
    assert exploration.rollouts.token_ids.tolist() == [id for one in exploration.samples for id in one.token_ids]


def test_the_reward_counts_once_and_every_drawn_token_has_the_advantage(policy: Policy, both: Any) -> None:
    rollouts, samples = prepared(policy, both[0]), both[0][1].samples
    # Guesses of 1: 0 and 9, 1 at once, 2 and 7. Of 5: 0 and 9, 1 and 8, 2 and 7. Each is worth 1 - distance / 10.
    totals = [0.9 + 0.2, 1.0, 0.9 + 0.4, 0.5 + 0.6, 0.6 + 0.7, 0.7 + 0.8]
    assert both[0][1].scores.total == pytest.approx(totals)
    baseline = [sum(totals[:3]) / 3] * 3 + [sum(totals[3:]) / 3] * 3
    expected = [total - mean for total, mean, one in zip(totals, baseline, samples, strict=True) for _ in one.token_ids]
    assert rollouts.advantage.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("advantage", [*members(AdvantageEstimator)], ids=lambda cls: cls.__name__)
def test_advantages_do_not_depend_on_the_pieces(policy: Policy, both: Any, advantage: Any) -> None:
    found = [prepared(policy, one, advantage=advantage()).advantage for one in both]
    assert torch.equal(*found) and (found[0].any() or advantage is NoAdvantage)


def test_turns_are_credited_across_pieces(policy: Policy, both: Any) -> None:
    rollouts, samples = prepared(policy, both[0], advantage=ProcessSupervision()), both[0][1].samples
    for one, own in zip(samples, rollouts.advantage.split([len(one.token_ids) for one in samples]), strict=True):
        ends = one.conversation.ends
        # The tokens of a turn agree; those of the first have the credit of the second too.
        assert (own[: ends[0] + 1] == own[0]).all()
        assert (own[ends[0] + 1 :] == own[-1]).all()
        assert len(ends) == 1 or own[0] != own[-1]


def test_a_penalty_is_that_of_the_whole_completion(policy: Policy, both: Any) -> None:
    """The reward of a completion, less beta times the summed KL of both pieces, less the mean of the group."""
    reference = FrozenCopy()
    reference.refresh(policy_of(seed=1, vocab_size=128))
    rollouts = prepared(policy, both[0], reference=reference, objective=Objective(reward_kl=KLPenalty(beta=0.1)))
    exploration = both[0][1]
    lengths = [len(one.token_ids) for one in exploration.samples]
    penalty = (rollouts.old_logp - rollouts.ref_logp).double().split(lengths)
    totals = torch.tensor(
        [total - 0.1 * float(own.sum()) for total, own in zip(exploration.scores.total, penalty, strict=True)]
    )
    expected = totals - totals.view(2, 3).mean(1).repeat_interleave(3)
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(rollouts.advantage, expected.repeat_interleave(torch.tensor(lengths)).float())
