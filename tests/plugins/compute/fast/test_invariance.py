"""Execution never changes the gradient: token budget, row order, padding, ranks, sharding.

The policy's weights are about as large as a new model's. Ten times larger ones make the float32 gradient itself
inexact: then it is 1e-6 away from the float64 one, whichever way it is computed.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_of_ranks import PRECISIONS, SURROGATES, WEIGHTINGS, cases, in_every_way
from helpers.contracts import members
from helpers.fast import fit, policy_of
from helpers.fitting import Gradients, relative, scalars

from grpo_lightning import CHORD, LUFFY, FixedEntropy, Objective, Surrogate, TokenWeighting

Found = dict[str, dict[str, Any]]

WAYS = ["parts", "ddp", "fsdp2"]
"""A small token budget in one process, and two processes with one; each against whole minibatches in one process."""
DECIDING = ["parts", "ddp"]
"""Of what the ranks decide together, whether weights are sharded or not."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What `gradient_of_ranks` found in each way."""
    folder = tmp_path_factory.mktemp("invariance")
    found = in_every_way(folder)
    for surrogate, measure in product(("Clipped", "SequenceClipped", "TargetProbability"), ("clip_low", "clip_high")):
        share = scalars(folder / "whole" / "objectives")[f"policy/{measure}"]
        own = [n for n, case in enumerate(cases()) if type(case.objective.surrogate).__name__ == surrogate]
        # The mean of a step's two updates, the first of which is at the bounds nowhere. They are not there for show.
        assert 2 * sum(share[step] for step in own) / len(own) > 0.05
    return found


def largest_difference(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> float:
    """The largest relative difference between the gradients of two runs' updates."""
    assert len(ours) == len(theirs) > 0
    return max(relative(a, b) for a, b in zip(ours, theirs, strict=True))


def test_every_surrogate_has_its_cases() -> None:
    of_demonstrations = {CHORD, LUFFY}  # a loop of theirs decides, in tests/plugins/sources/demonstrations
    assert {*members(Surrogate)} - of_demonstrations == {type(surrogate) for surrogate in SURROGATES}
    assert {*members(TokenWeighting)} == {type(weighting) for weighting in WEIGHTINGS}


@pytest.mark.parametrize("way", WAYS)
def test_every_objective_and_a_run_that_learns_have_the_same_gradients(found: Found, way: str) -> None:
    assert len(found["whole"]["objectives"]) == 2 * len(SURROGATES)
    for run in ("objectives", "learning"):
        assert largest_difference(found[way][run], found["whole"][run]) < 1e-6


@pytest.mark.parametrize("way", DECIDING)
def test_dynamic_sampling_chooses_the_same_groups(found: Found, way: str) -> None:
    groups = found["whole"]["groups"]
    # Some step had to look further than the four prompts it drew first.
    assert any(step[-1] - step[0] > 3 for step in groups)
    assert found[way]["groups"] == groups
    assert largest_difference(found[way]["sampling"], found["whole"]["sampling"]) < 1e-6


@pytest.mark.parametrize("way", DECIDING)
def test_a_stop_rule_stops_at_the_same_update(found: Found, way: str) -> None:
    # Two steps of up to 8 updates: the rule stopped one of them early.
    assert 2 < len(found["whole"]["stop"]) < 16
    # The policies themselves have gone apart by rounding after so many large updates.
    assert largest_difference(found[way]["stop"], found["whole"]["stop"]) < 1e-5


@pytest.mark.parametrize("way", DECIDING)
def test_stale_rollouts_and_their_corrections_are_the_same(found: Found, way: str) -> None:
    assert len(found["whole"]["stale"]) == 6
    assert largest_difference(found[way]["stale"], found["whole"]["stale"]) < 1e-6


@pytest.mark.parametrize("way", ["whole", *WAYS])
@pytest.mark.parametrize(("precision", "dtype", "shares"), PRECISIONS)
def test_every_precision_over_ranks(found: Found, way: str, precision: str, dtype: torch.dtype, shares: bool) -> None:
    run, exact = found[way][f"still {precision} {dtype} {shares}"], found["whole"]["still 32-true torch.float32 False"]
    assert run["ratios"] and set(run["ratios"].values()) == {1.0}, "nothing was learned"
    tolerance = 1e-6 if (precision, dtype) == ("32-true", torch.float32) else 0.03
    assert largest_difference(run["gradients"], exact["gradients"]) < tolerance


@pytest.mark.parametrize("way", WAYS)
def test_conversations_of_unequal_lengths_have_the_same_gradients(found: Found, way: str) -> None:
    expected, actual = found["whole"]["conversations"], found[way]["conversations"]
    assert len(expected["gradients"]) == 4
    assert largest_difference(actual["gradients"], expected["gradients"]) < 1e-6
    for name in ("rollout/turns", "rollout/branches", "rollout/context", "reward/mean"):
        assert actual["logged"][name] == pytest.approx(expected["logged"][name])
    # History was rewritten, and the ranks drew unequal numbers of turns.
    assert max(expected["logged"]["rollout/branches"].values()) > 0
    assert way == "parts" or len({*actual["turns"]}) == 2


def test_packs_passed_in_threads_do_not_change_the_gradient(tmp_path: Path) -> None:
    seen = {name: Gradients() for name in ("one", "two", "two again")}
    for (name, recorded), threads in zip(seen.items(), (1, 2, 2), strict=True):
        policy = policy_of(scale=0.05)
        policy.compute.threads = threads
        fit(
            tmp_path / name,
            [recorded],
            loop={"max_tokens": 40, "mu": 2},
            trainer={"max_epochs": 1},
            policy=policy,
            objective=Objective(beta=0.1, entropy=FixedEntropy(0.01)),
        )
    one = seen.pop("one").updates
    assert len(one) == 2
    for recorded in seen.values():
        assert largest_difference(recorded.updates, one) < 1e-6
    for first, again in zip(seen["two"].updates, seen["two again"].updates, strict=True):
        assert all(first[name].equal(gradient) for name, gradient in again.items())
