"""Fixtures of plugins' tests."""

from collections.abc import Iterator

import pytest
from helpers import vllm_server_stand_in, vllm_stand_in
from helpers.fast import policy_of

from grpo_lightning.policy.policy import Policy


@pytest.fixture
def policy(shape: str) -> Policy:
    """A tiny random policy of each architecture, with what the command line sets."""
    return policy_of(shape)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a policy that vLLM can serve."""
    folder = tmp_path_factory.mktemp("served") / "policy"
    policy_of("qwen2", **vllm_stand_in.SIZES).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def server(served: str) -> Iterator[vllm_server_stand_in.StandIn]:
    """A stand-in for vLLM that serves it."""
    with vllm_server_stand_in.serving(served) as server:
        yield server
