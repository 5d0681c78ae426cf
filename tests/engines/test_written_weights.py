"""Weights that are written in place, without a new `Policy.version`."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.adapters import adapted, move
from helpers.copying import Copying
from helpers.drawing import PROMPTS, gap
from helpers.tiny import policy_of, rollouts_of

from grpo_lightning import Completion, FrozenCopy, Policy, RandomKey, Request, RolloutEngine, Sampling
from grpo_lightning.command.overview import optional
from grpo_lightning.policy.snapshots import trained_tensors

COPYING: dict[str, Callable[[], RolloutEngine]] = {"copying": Copying}
if Native := optional("NativeEngine"):
    COPYING["packed"] = partial(Native, packed=True)


def sampled(engine: RolloutEngine) -> list[Completion]:
    return engine.complete(Request.from_prompts(PROMPTS, 2), Sampling(max_new_tokens=6), RandomKey())


def sampled_from(engine: RolloutEngine, policy: Policy) -> list[Completion]:
    with engine.ready(policy):
        return sampled(engine)


def write(policy: Policy) -> None:
    """As Lightning swaps an average in."""
    for parameter in policy.parameters():
        average = 0.5 * parameter.data
        parameter.data.copy_(average)


@pytest.mark.parametrize("kind", COPYING)
def test_an_engine_with_copies_draws_from_what_was_written(kind: str) -> None:
    engine, policy = COPYING[kind](), policy_of("llama")
    with engine.awake():
        assert gap(policy, PROMPTS, sampled_from(engine, policy)) < 1e-4
        version = policy.version
        write(policy)
        assert policy.version == version
        assert gap(policy, PROMPTS, sampled_from(engine, policy)) < 1e-4
        with engine.ready(policy):
            write(policy)
            if kind == "packed":
                assert gap(policy, PROMPTS, sampled(engine)) < 1e-4


def test_an_engine_copies_as_often_as_weights_were_written() -> None:
    engine, policy = Copying(), policy_of("llama")
    sampled_from(engine, policy)
    sampled_from(engine, policy)
    assert engine.num_syncs == 1
    values = policy.state_dict()
    saved = {name: value.clone() for name, value in values.items()}
    write(policy)
    sampled_from(engine, policy)
    sampled_from(engine, policy)
    assert engine.num_syncs == 2
    for name, value in values.items():
        value.copy_(saved[name])
    sampled_from(engine, policy)
    assert engine.num_syncs == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_matrix_alone_changes_the_fingerprint(dtype: torch.dtype) -> None:
    policy = policy_of("llama")
    policy.to(dtype)
    for parameter in policy.parameters():
        before = policy.fingerprint()
        assert policy.fingerprint() == before
        parameter.data.mul_(1 + 2.0**-7)
        assert policy.fingerprint() != before


def test_weights_that_are_not_finite_have_a_fingerprint() -> None:
    policy = policy_of("llama")
    next(policy.parameters()).data.fill_(torch.nan)
    assert policy.fingerprint() == policy.fingerprint()


def test_an_adapter_that_is_switched_off_is_another_policy() -> None:
    policy = adapted()
    before = policy.fingerprint()
    with policy.without_adapter():
        assert policy.fingerprint() != before
    assert policy.fingerprint() == before


@torch.no_grad()
def test_autocast_casts_weights_again_when_they_were_swapped() -> None:
    """It caches casts by the tensor: the reference would be computed with the policy's."""
    policy, rollouts = adapted(moved=0.1), rollouts_of([5, 7])
    reference = FrozenCopy()
    reference.refresh(policy)
    move(policy, 0.3)
    values = {name: value.clone() for name, value in policy.trained_state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        expected_reference = reference(policy, rollouts)
    with torch.autocast("cpu", torch.bfloat16):
        expected_policy = policy(rollouts).logp
    assert not expected_policy.equal(expected_reference)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert policy(rollouts).logp.equal(expected_policy)
            assert reference(policy, rollouts).equal(expected_reference)
        with trained_tensors(policy, {name: 2 * value for name, value in values.items()}):
            assert not policy(rollouts).logp.equal(expected_policy)
        policy.load_state_dict({name: 2 * value for name, value in policy.state_dict().items()})
        assert not policy(rollouts).logp.equal(expected_policy)
