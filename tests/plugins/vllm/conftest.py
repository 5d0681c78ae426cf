"""What the tests of VLLMEngine share."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from helpers import vllm_stand_in

from grpo_lightning.plugins.vllm.engine import VLLMEngine


@pytest.fixture(params=["stand-in", pytest.param("vllm", marks=pytest.mark.vllm)])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the engine finds as `vllm`."""
    if request.param == "stand-in":
        vllm_stand_in.install(monkeypatch)
    elif find_spec("vllm") is None:
        pytest.skip("no vLLM here: make test-vllm")
    return str(request.param)


@pytest.fixture
def engine(vllm: str) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(max_cache_gib=0.06)
    yield engine
    engine.close()
