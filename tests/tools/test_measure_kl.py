import math
from pathlib import Path

import pytest
import torch
from helpers.loading import load_tool
from helpers.paths import ROOT

tool = load_tool("measure_kl")
EVERY = tool.PLAIN | tool.WEIGHTED | tool.REWARD
ON_POLICY, OFF_POLICY = tool.draw(0.1, 0.0, count=5), tool.draw(0.1, 0.05, count=5)


def test_distances_are_as_asked():
    for triples, away in ((ON_POLICY, 0.0), (OFF_POLICY, 0.05)):
        for one in triples:
            assert float(tool.divergence(one.logp, one.ref_logp)) == pytest.approx(0.1, rel=1e-9)
            assert float(tool.divergence(one.old_logp, one.logp)) == pytest.approx(away, rel=1e-9, abs=1e-15)


def test_value_by_hand():
    # π_θ = π_old = (1/2, 1/2), π_ref = (1/4, 3/4): k1 is log 2 and log 2/3, mean log(4/3) / 2, deviation log(3) / 2.
    logits = torch.zeros(2, dtype=torch.float64)
    half = logits.log_softmax(0)
    policies = tool.Policies(logits, torch.tensor([0.25, 0.75], dtype=torch.float64).log(), half)
    found = tool.value(tool.PLAIN["k1"], policies)
    assert found.exact == pytest.approx(math.log(4 / 3) / 2)
    assert (found.mean, found.deviation) == (pytest.approx(found.exact), pytest.approx(math.log(3) / 2))
    # k3 there: 1/2 + log 2 - 1 and 3/2 + log(2/3) - 1; its half difference is the deviation.
    found = tool.value(tool.PLAIN["k3"], policies)
    assert found.mean == pytest.approx(found.exact)
    assert found.deviation == pytest.approx(abs((0.5 + math.log(2) - 1) - (1.5 + math.log(2 / 3) - 1)) / 2)


def test_divergence_gradients_are_those_of_the_formulas():
    # d KL(θ ‖ ref)/d logits = θ (log θ/ref - KL); d KL(ref ‖ θ)/d logits = θ - ref.
    for one in OFF_POLICY:
        found = tool.gradient(tool.PLAIN["k1"], one)
        theta, log_ratio = one.logp.exp(), one.logp - one.ref_logp
        torch.testing.assert_close(found.reverse, theta * (log_ratio - (theta * log_ratio).sum()), rtol=0, atol=1e-12)
        torch.testing.assert_close(found.forward, theta - one.ref_logp.exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3", "weighted k1", "weighted k3"])
def test_values_without_bias_on_policy(name: str):
    for one in ON_POLICY:
        assert abs(tool.value(EVERY[name], one).bias) < 1e-12


@pytest.mark.parametrize(
    ("name", "unbiased"), [("k1", False), ("k3", False), ("weighted k1", True), ("weighted k3", True)]
)
def test_values_off_policy(name: str, unbiased: bool):
    biases = [abs(tool.value(EVERY[name], one).bias) for one in OFF_POLICY]
    assert max(biases) < 1e-12 if unbiased else min(biases) > 1e-4


def test_gradient_of_k1_in_the_objective_vanishes_on_policy():
    for one in ON_POLICY:
        found = tool.gradient(EVERY["k1"], one)
        assert found.vanishes and found.cosine(found.reverse) == 0.0 and found.error(found.reverse) == pytest.approx(1)


@pytest.mark.parametrize("name", ["k2", "weighted k1", "weighted k3", "k1 in the reward"])
def test_gradients_of_the_reverse_divergence_on_policy(name: str):
    for one in ON_POLICY:
        found = tool.gradient(EVERY[name], one)
        assert found.error(found.reverse) < 1e-12 and found.cosine(found.reverse) == pytest.approx(1, abs=1e-12)


def test_gradient_of_k3_is_that_of_the_forward_divergence_on_policy():
    for one in ON_POLICY:
        found = tool.gradient(EVERY["k3"], one)
        assert found.error(found.forward) < 1e-12 < 0.05 < found.error(found.reverse)


@pytest.mark.parametrize("name", EVERY)
def test_only_weighted_k1_and_k3_keep_the_gradient_off_policy(name: str):
    errors = [(found := tool.gradient(EVERY[name], one)).error(found.reverse) for one in OFF_POLICY]
    assert max(errors) < 1e-12 if name in ("weighted k1", "weighted k3") else min(errors) > 0.05


def test_two_tokens():
    found = tool.two_token_gradients(torch.Generator().manual_seed(1))
    errors = {name: one.error(one.reverse) for name, one in found.items()}
    assert errors["k1 in the reward"] < 1e-12
    assert errors["k2"] == pytest.approx(errors["weighted k3"]) and errors["k2"] > 0.01


def test_the_page_has_what_is_measured():
    assert tool.measure() in (ROOT / "docs" / "kl.md").read_text(encoding="utf-8")


def test_tables_go_between_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool, "measure", lambda: "| new |")
    page = tmp_path / "page.md"
    page.write_text(f"above\n{tool.OPEN}\nold\n{tool.CLOSE}\nbelow")
    tool.main(["--write", str(page)])
    assert page.read_text() == f"above\n{tool.OPEN}\n\n| new |\n\n{tool.CLOSE}\nbelow"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="needs the lines"):
        tool.main(["--write", str(page)])
