"""What the tests of VLLMEngine share."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from helpers import vllm_stand_in
from helpers.tiny import read_policy
from helpers.vllm_server_stand_in import StandIn, serving

from grpo_lightning import Policy
from grpo_lightning.plugins.engines.vllm.vllm_engine import VLLMEngine


@pytest.fixture(params=["stand-in", pytest.param("vllm", marks=pytest.mark.vllm)])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the engine finds as `vllm`."""
    if request.param == "stand-in":
        vllm_stand_in.install(monkeypatch)
    elif find_spec("vllm") is None:
        pytest.skip("no vLLM here: make test-vllm")
    return str(request.param)


@pytest.fixture
def policy(served: str) -> Policy:
    return read_policy(served)


@pytest.fixture
def servers(served: str) -> Iterator[list[StandIn]]:
    """Two stand-ins of the test's own."""
    with serving(served) as one, serving(served) as other:
        yield [one, other]


@pytest.fixture
def engine(vllm: str) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(max_cache_gib=0.06)
    yield engine
    engine.close()
