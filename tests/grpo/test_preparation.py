"""`prepare` alone, without a trainer: each thing that it computes against an independent computation."""

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.contracts import needs
from helpers.tiny import forced_logp, policy_of, prompts_of, teacher_forced
from torch import Tensor

from grpo_lightning import GroupMean, MicroBatch, Objective, Policy, Rollouts, Sampling, SingleTurn, TokenMean, ranks
from grpo_lightning.command.overview import optional
from grpo_lightning.grpo.prepare import prepare
from grpo_lightning.maths.filters import ENTROPY_RANK, Truncated
from grpo_lightning.maths.kl import K1, KLPenalty
from grpo_lightning.maths.minibatches import minibatch_of_rows
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.maths.surrogates import Clipped
from grpo_lightning.policy.snapshots import FrozenCopy, MovingAverage, RecordedLogp

TopEntropy: Any = optional("TopEntropy")

LENGTHS = [4, 9, 1, 6, 2, 5, 3, 7]
GROUP = [0, 0, 1, 1, 2, 2, 3, 3]
REWARD = [1.0, 0.0, 0.5, 0.5, 0.0, 3.0, 1.0, 1.0]
"""The groups 1 and 3 have no spread, so their completions have no advantage."""
ADVANTAGE = [0.5, -0.5, 0.0, 0.0, -1.5, 1.5, 0.0, 0.0]
"""By hand: minus the mean of each group."""
CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "gpt2"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return policy_of(request.param)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def explored(rows: Sequence[int] = range(8)) -> tuple[Rollouts, RewardBatch]:
    """Two completions for each of four prompts, and their rewards."""
    generator = torch.Generator().manual_seed(1)
    completions = [torch.randint(6, 64, (length,), generator=generator).tolist() for length in LENGTHS]
    prompts = [prompt.token_ids for prompt in prompts_of([3, 5, 2, 4])]
    rollouts = Rollouts.from_lists(prompts, GROUP, completions).select(torch.tensor(rows, dtype=torch.int64))
    rollouts.temperature = 0.7
    rollouts.truncated = torch.tensor([row in (1, 4) for row in rows], dtype=torch.bool)
    rewards = RewardBatch(
        value=torch.tensor([[REWARD[row] for row in rows]], dtype=torch.float64),
        weight=torch.ones(1, dtype=torch.float64),
        group=rollouts.group,
        lengths=rollouts.lengths,
        segments=[None],
    )
    return rollouts, rewards


def cut(
    policy: Policy,
    rows: Sequence[int] = range(8),
    mu: int = 1,
    num_minibatches: int = 2,
    version: int | None = None,
    max_tokens: int = 30,
    sampler_logp: Tensor | None = None,
    **options: Any,
) -> tuple[Rollouts, list[list[MicroBatch]]]:
    """The rollouts after `prepare`, and the micro-batches; prompts 0 and 1 are the first of two minibatches."""
    rollouts, rewards = explored(rows)
    exploration: Any = SimpleNamespace(
        samples=[],
        rollouts=rollouts.with_columns({"sampler_logp": sampler_logp}),
        rewards=rewards,
        prompt_ids=[GROUP[row] for row in rows],
        policy_version=policy.version if version is None else version,
    )
    parts: Any = SimpleNamespace(
        **{
            "policy": policy,
            "objective": Objective(beta=0.1),
            "advantage": GroupMean(),
            "old_policy": RecordedLogp(),
            "reference": None,
            "sampling": Sampling(max_new_tokens=10),
            "explorer": SimpleNamespace(sampler=SingleTurn()),
        }
        | options
    )
    return prepare(parts, exploration, num_minibatches, mu, max_tokens)


def rollouts_in(micro_batches: list[list[MicroBatch]]) -> list[Rollouts]:
    return [micro_batch.rollouts for minibatch in micro_batches for micro_batch in minibatch]


def rows_in(micro_batches: list[list[MicroBatch]]) -> list[int]:
    return sorted(row for rollouts in rollouts_in(micro_batches) for row in rollouts.sample_index.tolist())


def expected_logp(policy: Policy, rollouts: Rollouts) -> Tensor:
    """[N] float64, completion by completion without padding."""
    prompts = rollouts.prompt_token_ids.split(rollouts.prompt_lengths.tolist())
    found = []
    for row, ids in enumerate(rollouts.token_ids.split(rollouts.lengths.tolist())):
        found.append(forced_logp(policy.model, prompts[int(rollouts.group[row])].tolist(), ids.tolist(), 0.7))
    return torch.cat(found)


def per_token(values: Sequence[float], rows: Sequence[int] = range(8)) -> list[float]:
    return [values[row] for row in rows for _ in range(LENGTHS[row])]


def test_every_token_has_the_advantage_of_its_completion(policy: Policy) -> None:
    rollouts, micro_batches = cut(policy)
    assert rollouts.advantage.tolist() == per_token(ADVANTAGE)
    for micro_batch in rollouts_in(micro_batches):
        assert micro_batch.advantage.tolist() == per_token(ADVANTAGE, micro_batch.sample_index.tolist())


@pytest.mark.parametrize(("max_tokens", "mu"), [(0, 2), (30, 1), (12, 2)])
def test_log_probs_equal_those_of_single_completions(policy: Policy, max_tokens: int, mu: int) -> None:
    reference = FrozenCopy()
    reference.refresh(policy_of(seed=5))
    rollouts, micro_batches = cut(policy, mu=mu, max_tokens=max_tokens, reference=reference)
    own, other = expected_logp(policy, rollouts), expected_logp(reference.policy, rollouts)
    torch.testing.assert_close(rollouts.ref_logp.double(), other, atol=1e-5, rtol=0)
    assert float((own - other).abs().max()) > 0.1
    for index, minibatch in enumerate(micro_batches):
        for micro_batch in rollouts_in([minibatch]):
            tokens = torch.cat([own.split(LENGTHS)[row] for row in micro_batch.sample_index.tolist()])
            if index == 0:  # the first update finds it out by itself
                assert micro_batch.old_logp is None
            else:
                torch.testing.assert_close(micro_batch.old_logp.double(), tokens, atol=1e-5, rtol=0)


class ReadsOldLogp(Clipped):
    reads_old_logp = True


class NotesRows(RecordedLogp):
    """Notes the rows of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []

    def forward(self, policy: Policy, rollouts: Rollouts) -> Tensor:
        self.rows.append(rollouts.sample_index.tolist())
        return super().forward(policy, rollouts)


def test_log_pi_old_read_first_covers_all_rows(policy: Policy) -> None:
    old_policy = NotesRows()
    rollouts, micro_batches = cut(policy, objective=Objective(ReadsOldLogp()), old_policy=old_policy)
    assert [sorted(rows) for rows in old_policy.rows[:2]] == [[0, 1], [4, 5]]  # the others have no advantage
    assert old_policy.rows[:2] == [micro_batch.sample_index.tolist() for micro_batch in rollouts_in(micro_batches)]
    assert sorted(row for rows in old_policy.rows for row in rows) == [*range(8)]
    torch.testing.assert_close(rollouts.old_logp.double(), expected_logp(policy, rollouts), atol=1e-5, rtol=0)


def test_an_old_policy_that_is_not_the_policy_computes_every_minibatch(policy: Policy) -> None:
    average = MovingAverage(alpha=0.5)
    average.refresh(policy_of(seed=5))
    average.refresh(policy)
    rollouts, micro_batches = cut(policy, old_policy=average)
    assert not any(micro_batch.old_logp is None for micro_batch in rollouts_in(micro_batches))
    expected = expected_logp(average.policy, rollouts)
    torch.testing.assert_close(rollouts.old_logp.double(), expected, atol=1e-5, rtol=0)


def test_weights_are_those_of_the_whole_minibatch(policy: Policy) -> None:
    _, micro_batches = cut(policy, max_tokens=20, objective=Objective(beta=0.1, weighting=TokenMean()))
    for minibatch, rows in zip(micro_batches, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
        tokens = sum(LENGTHS[row] for row in rows)
        for micro_batch in rollouts_in([minibatch]):
            assert micro_batch.weight.tolist() == pytest.approx([1 / tokens] * micro_batch.num_tokens)


def test_dropped_rows_still_count_in_the_weights(policy: Policy) -> None:
    _, micro_batches = cut(policy, objective=Objective(weighting=TokenMean()))
    assert [rows_in([minibatch]) for minibatch in micro_batches] == [[0, 1], [4, 5]]
    assert micro_batches[0][0].rollouts.weight[0] == pytest.approx(1 / (4 + 9 + 1 + 6))


def test_a_kl_penalty_changes_the_rewards_of_all_completions(policy: Policy) -> None:
    reference = FrozenCopy()
    reference.refresh(policy_of(seed=5))
    objective = Objective(reward_kl=KLPenalty(beta=0.5, kl=K1()))
    rollouts, micro_batches = cut(policy, num_minibatches=1, objective=objective, reference=reference)
    kl = (expected_logp(policy, rollouts) - expected_logp(reference.policy, rollouts)).split(LENGTHS)
    rewards = [reward - 0.5 * math.fsum(part.tolist()) for reward, part in zip(REWARD, kl, strict=True)]
    means = [(rewards[row] + rewards[row + 1]) / 2 for row in range(0, 8, 2)]
    expected = [reward - means[row // 2] for row, reward in enumerate(rewards)]
    assert rollouts.advantage.tolist() == pytest.approx(per_token(expected), abs=1e-4)
    assert rows_in(micro_batches) == [*range(8)]


@needs(TopEntropy)
def test_entropy_ranks_and_masks_reach_the_weights(policy: Policy) -> None:
    rollouts, micro_batches = cut(policy, objective=Objective(beta=0.1, masks=[Truncated(), TopEntropy(0.5)]))
    prompts = rollouts.prompt_token_ids.split(rollouts.prompt_lengths.tolist())
    entropy = []
    for row, ids in enumerate(rollouts.token_ids.split(LENGTHS)):
        logp = teacher_forced(policy.model, prompts[GROUP[row]].tolist(), ids.tolist(), 0.7)
        entropy += (-(logp.exp() * logp).sum(1)).tolist()
    expected = [sum(other < own for other in entropy) / len(entropy) for own in entropy]
    # The first tokens of a group have equal entropies but for rounding, and so may change ranks.
    assert rollouts.columns[ENTROPY_RANK].tolist() == pytest.approx(expected, abs=1.5 / len(entropy))
    for micro_batch in rollouts_in(micro_batches):
        stays = ~micro_batch.per_token(micro_batch.truncated) & (micro_batch.columns[ENTROPY_RANK] >= 0.5)
        assert torch.equal(micro_batch.weight != 0, stays) and stays.any() and not stays.all()


def test_late_rollouts_take_log_pi_old_from_their_sampler(policy: Policy) -> None:
    recorded = torch.linspace(-3, -1, sum(LENGTHS))
    policy.version = 7
    _, micro_batches = cut(policy, version=6, sampler_logp=recorded)
    for micro_batch in rollouts_in(micro_batches):
        expected = torch.cat([recorded.split(LENGTHS)[row] for row in micro_batch.sample_index.tolist()])
        assert torch.equal(micro_batch.old_logp, expected)


class OtherRank:
    """`ranks.gather` of rank 1 of two: the other rank answers what this one is asked, in turn."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def __call__(self, value: Any) -> list[Any]:
        return [self.answers.pop(0), value]


def test_minibatches_are_dealt_by_prompt_id_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert minibatch_of_rows([31, 31, 7, 7, 40, 12], 2).tolist() == [1, 1, 0, 0, 1, 0]
    monkeypatch.setattr(ranks, "gather", OtherRank([{8, 40}]))
    # In order of id: 7 and 8, then 31 and 40.
    assert minibatch_of_rows([31, 31, 7, 7], 2).tolist() == [1, 1, 0, 0]
    monkeypatch.setattr(ranks, "gather", OtherRank([{8, 40}]))
    assert minibatch_of_rows([], 2).tolist() == []
