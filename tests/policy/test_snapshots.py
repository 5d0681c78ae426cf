import pytest
import torch
from helpers.adapters import adapted
from helpers.drawing import update
from helpers.tiny import policy_of, rollouts_of
from torch import nn

from grpo_lightning import FrozenCopy, MovingAverage, Policy

ROLLOUTS = rollouts_of([4, 9, 1, 6], prompt_lengths=[3, 1])


def logp(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy(ROLLOUTS).logp


def test_frozen_copy_keeps_the_log_probs_of_its_last_refresh(policy):
    copy, before = FrozenCopy(), logp(policy)
    copy.refresh(policy)
    first = copy.policy
    update(policy)
    assert copy(policy, ROLLOUTS).equal(before) and not copy(policy, ROLLOUTS).requires_grad
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert all(parameter.requires_grad for parameter in policy.parameters())
    copy.refresh(policy)
    now = logp(policy)
    update(policy)
    assert copy.policy is first and copy(policy, ROLLOUTS).equal(now)
    assert float((now - before).abs().max()) > 0.01


def test_frozen_copy_has_no_dropout_even_if_the_policy_keeps_it():
    policy = policy_of("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    before = logp(policy)
    policy.train()
    copy = FrozenCopy()
    copy.refresh(policy)
    assert copy(policy, ROLLOUTS).equal(before)
    # Training mode of the module that holds the reference does not reach it.
    nn.ModuleList([policy, copy]).train()
    assert copy(policy, ROLLOUTS).equal(before)
    assert policy.training


@pytest.mark.parametrize("make", [policy_of, lambda: policy_of(tie_word_embeddings=True), adapted])
def test_moving_average_goes_part_of_the_way(make):
    policy, average = make(), MovingAverage(alpha=0.25)
    average.refresh(policy)
    before = {name: value.clone() for name, value in policy.trained_state_dict().items()}
    update(policy)
    average.refresh(policy)
    averages = average.policy.state_dict()
    expected = {name: 0.25 * policy.state_dict()[name] + 0.75 * value for name, value in before.items()}
    assert before and all(torch.allclose(averages[name], value, atol=1e-6) for name, value in expected.items())
