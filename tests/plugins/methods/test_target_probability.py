import math

import pytest
import torch
from helpers.by_hand import rollouts_with
from torch import Tensor

from grpo_lightning import Rollouts, SurrogateResult, TargetProbability


def targets(rollouts: Rollouts, **kwargs: float) -> list[tuple[float, float]]:
    """Of each token, the probability at or under which it is let be, and the one at or over which it is."""
    before = {*rollouts.columns}
    columns = TargetProbability(**kwargs).prepare(rollouts)
    assert {values.dtype for values in columns.values()} == {torch.float32}
    assert rollouts.columns.keys() == before, "prepare writes nothing into the rollouts"
    low, high = (columns[name].exp().tolist() for name in ("logp_low", "logp_high"))
    return list(zip(low, high, strict=True))


def with_targets(rollouts: Rollouts) -> Rollouts:
    rollouts.add_columns(TargetProbability().prepare(rollouts))
    return rollouts


def evaluate(rollouts: Rollouts, probability: list[float]) -> tuple[SurrogateResult, Tensor]:
    assert rollouts.old_logp is not None
    logp = torch.tensor(probability).log().requires_grad_()
    result = TargetProbability()(logp, rollouts.old_logp, rollouts)
    return result, torch.autograd.grad(result.value.sum(), logp)[0]


def near(*pairs: tuple[float, float]) -> list:
    return [(pytest.approx(low, rel=1e-5), pytest.approx(high, rel=1e-5)) for low, high in pairs]


def test_a_good_token_goes_to_the_root_and_a_bad_one_to_the_square():
    # Different prefixes: the second tokens follow 5 and 6.
    rollouts = rollouts_with([[5, 9], [6, 9]], [1.0, -1.0], [0.04, 0.81, 0.5, 0.9])
    assert targets(rollouts) == near((0, 0.2), (0, 0.9), (0.25, math.inf), (0.81, math.inf))


def test_other_exponents():
    rollouts = rollouts_with([[5], [6]], [2.0, -0.1], [0.064, 0.5])
    assert targets(rollouts, good_exponent=1 / 3, bad_exponent=3) == near((0, 0.4), (0.125, math.inf))


def test_the_footnote_three_good_tokens_and_a_bad_one_of_a_quarter_each():
    # 1/2, 1/2, 1/2 and 1/16 sum to 25/16: divided by it 0.32, 0.32, 0.32 and 0.04.
    rollouts = rollouts_with([[5], [6], [7], [8]], [1.0, 1.0, 1.0, -1.0], [0.25] * 4)
    assert targets(rollouts) == near((0, 0.32), (0, 0.32), (0, 0.32), (0.04, math.inf))


def test_a_token_sampled_several_times_counts_once():
    # 5 three times, 6 once: 1/2 + 1/2, not 2.
    rollouts = rollouts_with([[5], [5], [5], [6]], [1.0] * 4, [0.25] * 4)
    assert targets(rollouts) == near((0, 0.5), (0, 0.5), (0, 0.5), (0, 0.5))


def test_a_first_token_in_which_the_advantages_cancel_is_held():
    rollouts = rollouts_with([[5, 6], [5, 7]], [1.0, -1.0], [0.4, 0.25, 0.4, 0.25])
    assert targets(rollouts) == near((0.4, 0.4), (0, 0.5), (0.4, 0.4), (0.0625, math.inf))
    # Wherever the policy has taken it.
    with_targets(rollouts)
    for shared in (0.1, 0.4, 0.9):
        result, gradient = evaluate(rollouts, [shared, 0.3, shared, 0.3])
        assert gradient.tolist() == [0, 1, 0, -1]
        assert (result.clipped_low ^ result.clipped_high).tolist() == [True, False, True, False]


@pytest.mark.parametrize("sign", [1, -1])
def test_advantages_that_cancel_but_for_rounding_have_cancelled(sign):
    advantage = [sign * 0.1, sign * 0.2, sign * -0.3]
    assert 0 < abs(math.fsum(torch.tensor(advantage).tolist())) < 1e-8
    rollouts = rollouts_with([[5, 6], [5, 7], [5, 8]], advantage, [0.4, 0.1] * 3)
    assert targets(rollouts)[::2] == near((0.4, 0.4), (0.4, 0.4), (0.4, 0.4))


def test_a_shared_token_follows_the_sum_of_its_advantages():
    # 1 - 0.4 - 0.4 > 0: good, though two of three are bad; both kinds push until it is there.
    rollouts = rollouts_with([[5, 6], [5, 7], [5, 8]], [1.0, -0.4, -0.4], [0.25, 0.1] * 3)
    assert targets(rollouts)[0] == targets(rollouts)[2] == near((0, 0.5))[0]
    _, gradient = evaluate(with_targets(rollouts), [0.3, 0.1] * 3)
    assert gradient[::2].tolist() == pytest.approx([1, -0.4, -0.4])
    _, gradient = evaluate(rollouts, [0.6, 0.1] * 3)
    assert gradient[::2].tolist() == [0, 0, 0]


def test_a_token_without_advantage_keeps_its_share_of_what_is_scaled():
    # Good 0.64 -> 0.8, idle 0.36 -> 0.36; over 1.16 together.
    rollouts = rollouts_with([[5], [6]], [1.0, 0.0], [0.64, 0.36])
    assert targets(rollouts) == near((0, 0.8 / 1.16), (0.36 / 1.16, 0.36 / 1.16))
    result, gradient = evaluate(with_targets(rollouts), [0.64, 0.36])
    assert gradient.tolist() == [1, 0]
    assert not (result.clipped_low | result.clipped_high).any()


def test_a_shared_token_has_one_target_in_spite_of_rounding():
    rollouts = rollouts_with([[5, 6], [5, 7]], [1.0, 1.0], [0.25, 0.1, 0.250001, 0.1])
    found = targets(rollouts)
    assert found[0] == found[2] == (0, pytest.approx(math.sqrt(0.2500005), rel=1e-5))


def test_a_token_has_a_gradient_until_it_reaches_its_target():
    rollouts = rollouts_with([[5], [6]], [2.0, -1.0], [0.25, 0.25])
    with_targets(rollouts)  # 0.5 and 0.0625.
    steps = [
        ([0.25, 0.25], [2, -1], [False, False]),
        ([0.49, 0.07], [2, -1], [False, False]),
        ([0.51, 0.06], [0, 0], [True, True]),
        ([0.99, 0.001], [0, 0], [True, True]),
        ([0.45, 0.08], [2, -1], [False, False]),
        ([0.01, 0.9], [2, -1], [False, False]),
    ]
    for probability, expected, settled in steps:
        result, gradient = evaluate(rollouts, probability)
        assert gradient.tolist() == expected
        # Settled is the good token above and the bad one below.
        assert result.clipped_high.tolist() == [settled[0], False]
        assert result.clipped_low.tolist() == [False, settled[1]]
        assert not result.unreachable.any()


def test_a_token_within_the_tolerance_is_at_its_target():
    # 0.999 has the root 0.9995, 0.0005 nats away; 0.25 has 0.5, and counts as there from 0.5 e^-0.01 = 0.495 on.
    rollouts = rollouts_with([[5, 9], [6, 9]], [1.0, -1.0], [0.999, 0.25, 0.0005, 0.25])
    found = targets(rollouts, tolerance=0.01)
    assert found[:2] == near((0, math.sqrt(0.999) * math.exp(-0.01)), (0, 0.5 * math.exp(-0.01)))
    assert found[3] == near((0.0625 * math.exp(0.01), math.inf))[0]
    rollouts.add_columns(TargetProbability(tolerance=0.01).prepare(rollouts))
    result, gradient = evaluate(rollouts, [0.999, 0.496, 0.0005, 0.063])
    assert gradient.tolist() == [0, 0, -1, 0]
    assert result.clipped_high.tolist() == [True, True, False, False]
    _, gradient = evaluate(rollouts, [0.98, 0.494, 0.0005, 0.064])
    assert gradient.tolist() == [1, 1, -1, -1]
