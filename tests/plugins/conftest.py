"""Fixtures of plugins' tests."""

import pytest
from helpers.fast import policy_of

from grpo_lightning.policy.policy import Policy


@pytest.fixture
def policy(shape: str) -> Policy:
    """A tiny random policy of each architecture, with what the command line sets."""
    return policy_of(shape)
