import pytest
import torch
from helpers.fitting import gradient_of
from helpers.tiny import policy_of, rollouts_of, rows_of
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import HalfPrecision

from grpo_lightning import BatchSize, MicroBatch, Minibatch, Objective, Rollouts, SequenceMean, per_element, ranks
from grpo_lightning.maths.minibatches import idle_micro_batch, rows_with_gradient

LENGTHS = [4, 9, 1, 6, 2, 5, 3, 7]


def weighted(advantage: list[float]) -> Rollouts:
    """Eight completions of two prompts with the weights of the whole batch."""
    rollouts = rollouts_of(LENGTHS, prompt_lengths=[3, 5], group=[0, 0, 0, 0, 1, 1, 1, 1])
    rollouts.advantage = per_element(torch.tensor(advantage), rollouts.lengths)
    batch = BatchSize(num_completions=8, num_groups=2, num_tokens=sum(LENGTHS))
    rollouts.weight = per_element(SequenceMean()(rollouts.lengths, rollouts.group, batch), rollouts.lengths)
    rollouts.old_logp = None
    return rollouts


def without_idle_rows(rollouts: Rollouts) -> Rollouts:
    return rollouts.select(rows_with_gradient(rollouts))


@pytest.mark.parametrize(
    ("counts", "rank", "kept"),
    [([(0, 4), (1, 3)], 0, []), ([(0, 0), (0, 2), (0, 5)], 1, [0]), ([(0, 0), (0, 2), (0, 5)], 2, [])],
    ids=["another rank has a row", "first of all rows", "a rank before it has rows"],
)
def test_ranks_keep_the_rows_that_one_process_would(counts, rank, kept, monkeypatch):
    """A row kept for its zero gradient counts in the diagnostics: there is one over all ranks, or none."""
    answers = iter([[moving > 0 for moving, _ in counts], [rows > 0 for _, rows in counts]])
    monkeypatch.setattr(ranks, "gather", lambda own: next(answers))
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    assert rows_with_gradient(weighted([0.0] * 8)).tolist() == kept


def test_the_row_kept_for_a_zero_gradient_has_weight_if_any_has():
    rollouts = weighted([0.0] * 8)
    rollouts.weight = torch.where(rollouts.per_token(torch.arange(8)) < 3, 0.0, rollouts.weight)
    assert rows_with_gradient(rollouts).tolist() == [3]
    rollouts.weight = torch.zeros_like(rollouts.weight)
    assert rows_with_gradient(rollouts).tolist() == [0]


def largest(gradient: dict[str, torch.Tensor]) -> float:
    return max(float(value.abs().max()) for value in gradient.values())


@pytest.mark.parametrize(
    ("advantage", "kept"),
    [
        ([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 1]),
        ([0.0, 0.0, 0.0, 0.0, -0.5, 0.0, 1.5, -1.0], [4, 6, 7]),
        ([0.1, 0.2, 0.3, -0.6, 1.0, -1.0, 2.0, -2.0], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_leaving_out_idle_rows_keeps_the_gradient(policy, advantage, kept):
    rollouts = weighted(advantage)
    active = without_idle_rows(rollouts)
    assert active.sample_index.tolist() == kept
    # Their weights stay those of the whole batch.
    before = rows_of(rollouts)
    assert rows_of(active) == [before[row] for row in kept]
    whole = gradient_of(policy, Objective(), [rollouts])
    assert largest(whole) > 0.01
    for name, gradient in gradient_of(policy, Objective(), [active]).items():
        torch.testing.assert_close(gradient, whole[name], atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_one_row_stays_if_all_are_idle_and_its_gradient_is_zero():
    policy = policy_of()
    active = without_idle_rows(weighted([0.0] * 8))
    assert active.sample_index.tolist() == [0]
    gradient = gradient_of(policy, Objective(), [active])
    assert largest(gradient) == 0
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_a_row_whose_tokens_of_advantage_are_all_masked_is_idle():
    # Both rows of advantage lose weight: the first all of it, the fifth that of one token.
    rollouts = weighted([1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0])
    rollouts.weight[:4] = 0
    rollouts.weight[sum(LENGTHS[:4])] = 0
    assert without_idle_rows(rollouts).sample_index.tolist() == [4]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_an_idle_micro_batch_adds_nothing(policy, beta):
    rollouts = weighted([1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 0.5, -0.5])
    micro_batches = rollouts.micro_batches(max_tokens=40)
    idle = idle_micro_batch(rollouts.temperature)
    assert largest(gradient_of(policy, Objective(beta=beta), [idle])) == 0
    without = gradient_of(policy, Objective(beta=beta), micro_batches)
    assert largest(without) > 0.01
    for name, gradient in gradient_of(policy, Objective(beta=beta), [*micro_batches, idle]).items():
        assert gradient.equal(without[name])


def test_lightning_passes_on_the_micro_batches_of_the_loop() -> None:
    # Each notes its log-probs in the first pass for the others.
    micro_batches = [MicroBatch(rollouts) for rollouts in weighted([1.0] * 8).micro_batches(max_tokens=40)]
    minibatch = Minibatch(micro_batches, True, object())  # type: ignore[arg-type]
    assert move_data_to_device(minibatch, torch.device("meta")) is minibatch
    assert HalfPrecision("bf16-true").convert_input(minibatch) is minibatch
    assert micro_batches[0].rollouts.advantage.dtype == torch.float32
