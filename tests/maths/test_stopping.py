from typing import Any

import torch
from helpers.contracts import needs

from grpo_lightning.command.overview import optional
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.stopping import KLAbove, Passes, StopRule

AllConverged: Any = optional("AllConverged")
ObjectivePlateau: Any = optional("ObjectivePlateau")


def update(**numbers: float) -> Diagnostics:
    """Diagnostics of ten tokens with an advantage and not near a bound, but for `numbers`."""
    defaults = dict.fromkeys(Diagnostics.__dataclass_fields__, 0.0) | {"tokens": 10.0, "has_advantage": 10.0}
    return Diagnostics(**{name: torch.tensor(value) for name, value in (defaults | numbers).items()})


def stops(rule: StopRule, updates: list[Diagnostics], num_minibatches: int = 1) -> list[bool]:
    """The decisions of the rule at every update but the first."""
    return [rule(updates[:count], num_minibatches) for count in range(2, len(updates) + 1)]


@needs(AllConverged)
def test_all_converged_by_hand():
    # Of 10 tokens with an advantage 4 + 4 and then 4 + 5 are at a bound.
    updates = [update(), update(clipped_low=4.0, clipped_high=4.0), update(clipped_low=4.0, clipped_high=5.0)]
    assert stops(AllConverged(fraction=0.9), updates) == [False, True]
    assert stops(AllConverged(fraction=1.0), updates) == [False, False]
    assert stops(AllConverged(fraction=0.8), updates) == [True, True]


@needs(AllConverged)
def test_all_converged_ignores_idle_and_unreachable_tokens():
    # 10 tokens, 6 have an advantage, 2 of them can never reach their bound: 4 must.
    updates = [update(has_advantage=6.0, unreachable=2.0, clipped_high=clipped) for clipped in (0.0, 3.0, 4.0)]
    assert stops(AllConverged(fraction=1.0), updates) == [False, True]


@needs(AllConverged)
def test_all_converged_decides_at_the_end_of_a_pass():
    # Two minibatches a pass: 10 and 2 of 20, then 10 and 8 of 20. The first minibatch alone has converged each time.
    updates = [update(clipped_low=clipped) for clipped in (10.0, 2.0, 10.0, 8.0)]
    assert stops(AllConverged(fraction=0.9), updates, num_minibatches=2) == [False, False, True]
    # Half is there after the first pass; in the middle of the second, 2 and 10 are no pass.
    assert stops(AllConverged(fraction=0.5), updates, num_minibatches=2) == [True, False, True]


@needs(AllConverged)
def test_a_step_in_which_nothing_can_move_has_converged():
    assert stops(AllConverged(fraction=1.0), [update(has_advantage=0.0)] * 2) == [True]
    assert stops(AllConverged(fraction=1.0), [update(has_advantage=3.0, unreachable=3.0)] * 2) == [True]


@needs(ObjectivePlateau)
def test_objective_plateau_by_hand():
    # It rises by 0.5, by 0.0005, falls, and rises to no more than the best and a little.
    updates = [update(objective=value) for value in (0.0, 0.5, 0.5005, 0.4, 0.5009)]
    assert stops(ObjectivePlateau(patience=1, min_delta=1e-3), updates) == [False, True, True, True]
    assert stops(ObjectivePlateau(patience=2, min_delta=1e-3), updates) == [False, False, True, True]
    assert stops(ObjectivePlateau(patience=3, min_delta=1e-3), updates) == [False, False, False, True]
    assert stops(ObjectivePlateau(patience=1, min_delta=0.0), updates) == [False, False, True, False]


@needs(ObjectivePlateau)
def test_objective_plateau_counts_anew_after_a_rise():
    updates = [update(objective=value) for value in (0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0)]
    assert stops(ObjectivePlateau(patience=2, min_delta=0.1), updates) == [False, False, False, False, False, True]


@needs(ObjectivePlateau)
def test_objective_plateau_sums_the_minibatches_of_a_pass():
    # Passes of 0.5, 0.9 and 0.9, though single updates fall; nothing is decided in the middle of a pass.
    updates = [update(objective=value) for value in (1.0, -0.5, 0.2, 0.7, 0.9, 0.0)]
    rule = ObjectivePlateau(patience=1, min_delta=1e-3)
    assert stops(rule, updates, num_minibatches=2) == [False, False, False, False, True]


def test_kl_above_by_hand():
    # 0.1 and 0.11 nats over 10 tokens; of the last update only.
    updates = [update(kl_old=9.0), update(kl_old=0.09), update(kl_old=0.11)]
    assert stops(KLAbove(target=0.01), updates) == [False, True]
    assert stops(KLAbove(target=0.02), updates) == [False, False]
    # In the middle of a pass too.
    assert stops(KLAbove(target=0.01), updates, num_minibatches=3) == [False, True]
    assert stops(KLAbove(target=0.01), [update(tokens=0.0)] * 2) == [False]


def test_the_first_update_never_ends_the_passes():
    passes = Passes(KLAbove(0.01), num_minibatches=1)
    # It is what moves the policy at all.
    passes.record(update(kl_old=5.0))
    assert not passes.ended
    passes.record(update(kl_old=0.05))
    assert not passes.ended
    passes.record(update(kl_old=5.0))
    assert passes.ended_by == "KLAbove"


def test_a_rule_ignores_updates_that_are_not_finite():
    passes = Passes(KLAbove(0.01), num_minibatches=1)
    for kl_old, is_finite in ((0.05, True), (5.0, False)):
        passes.record(update(kl_old=kl_old), is_finite)
    assert not passes.ended
