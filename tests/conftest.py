"""Fixtures shared by all tests. The helpers they stand on are in tiny.py."""

import random

import pytest
import tiny
import torch

from grpo_lightning.policy import Policy

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=tiny.SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    """Each of the architectures that every part has to work with."""
    return request.param


@pytest.fixture
def policy(shape: str) -> Policy:
    """A tiny random policy of each architecture."""
    return tiny.policy_of(shape)
