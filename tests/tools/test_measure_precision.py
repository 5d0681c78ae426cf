"""tools/measure_precision.py: what is measured of a policy."""

from pathlib import Path

import pytest
import torch
from helpers.loading import load_tool
from helpers.tiny import policy_of


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool("measure_precision")
    policy_of("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(
        tool, "changed", lambda path, config, precision, dtype, rate: 1.0 if dtype == "float32" else 0.1
    )
    head, _, exact, mixed, half = tool.table(str(tmp_path), "none.yaml").splitlines()
    # A context of 128 tokens has position 50 only.
    assert head == "| precision | KL to float32 at 50 | weights changed, lr 1e-06 | weights changed, lr 1e-05 |"
    assert exact == "| `32-true` | 0.0e+00 | 100.0 % | 100.0 % |"
    for row in (mixed, half):
        assert 0 < float(row.split("|")[2]) < 0.01
    assert half.endswith("| 10.0 % | 10.0 % |")


def test_the_divergence_is_that_of_the_full_distributions() -> None:
    tool = load_tool("measure_precision")
    own, other = policy_of("llama"), policy_of("llama", seed=1)
    tokens = torch.arange(6, 20)[None]
    p, q = (policy.model(tokens).logits[0].double().softmax(-1) for policy in (own, other))
    expected = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(tool.divergence(own, other, False, tokens), expected, rtol=1e-4, atol=1e-6)
