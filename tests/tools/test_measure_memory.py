"""What a fit announces is what it uses: real runs, each in a process of its own."""

import sys
from collections.abc import Iterator

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.whole

TOOLS = str(ROOT / "tools")


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(TOOLS)
    yield
    sys.modules.pop("measure_memory", None)


def test_a_small_model_uses_what_it_announces() -> None:
    from measure_memory import Case, measure

    # Activations make half of it: Python and its libraries alone are about 400 MiB.
    found = measure(Case("1M", lengths="full", max_tokens=9000))
    assert found["announced"] > 1.2 * found["process"]
    assert found["announced"] == pytest.approx(found["used"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["gqa", "plain"])
@pytest.mark.parametrize("lengths", ["full", "lognormal", "runaway"])
def test_a_model_of_135_million_parameters_uses_what_it_announces(heads: str, lengths: str) -> None:
    from measure_memory import Case, measure

    found = measure(Case("135M", heads=heads, lengths=lengths))
    assert found["announced"] >= 0.8 * found["used"]
    if lengths == "full":
        assert found["announced"] == pytest.approx(found["used"], rel=0.2)
