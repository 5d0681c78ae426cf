"""experiments/roofline: counts of a step against numbers worked out by hand, the rates, the table and the plot."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.experiment import imported
from helpers.paths import ROOT
from helpers.tiny import policy_of, rollouts_of
from transformers import LlamaConfig

from grpo_lightning.training.throughput import Cost

FOLDER = ROOT / "experiments" / "roofline"


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    with imported("versus_trl", "roofline") as modules:
        yield modules


def model_of(parts: SimpleNamespace, **changes: Any) -> Any:
    """A model of round numbers: 10 weights below the head, 5 in it, 2 operations per pair, 3 numbers cached."""
    values = {"cost": Cost(60.0, 30.0, 6.0), "parameters": 15, "weights": 15, "cache": 3, "vocabulary": 7}
    return parts.counts.Model(**values | changes)


def test_reading_prompts(parts: SimpleNamespace) -> None:
    sizes = parts.counts.Sizes.even(prompts=2, group_size=4, prompt_tokens=5, new_tokens=3)
    # 10 tokens x 2 x 10 weights, the head for two of them, 2 x 25 pairs of 2 operations.
    found = model_of(parts).prefill(sizes)
    assert found.operations == 10 * 20 + 2 * 10 + 50 * 2
    # 15 weights and 10 tokens' cache of 4 bytes per number; two rows of logits.
    assert found.bytes == 4 * (15 + 30) + 4 * 7 * 2
    half = model_of(parts).prefill(sizes, width=2, shared=False)
    assert (half.operations, half.bytes) == (40 * 20 + 8 * 10 + 200 * 2, 2 * (15 + 120) + 4 * 7 * 8)


def test_decoding_by_position_while_rows_end(parts: SimpleNamespace) -> None:
    # Two groups of two; lengths 1, 3 and 2, 2: the first position passes three rows, the second one of the first group.
    sizes = parts.counts.Sizes(prompt_tokens=5, group_size=2, lengths=(1, 3, 2, 2))
    first, second = model_of(parts).decoding(sizes)
    assert first.operations == 3 * (20 + 10 + 2 * 6)
    assert second.operations == 1 * (20 + 10 + 2 * 7)
    # Both prompts are read once, then one; each row reads its own tokens so far.
    assert first.bytes == 4 * (15 + 3 * (2 * 5 + 3 * 1)) + 4 * 7 * 3
    assert second.bytes == 4 * (15 + 3 * (1 * 5 + 1 * 2)) + 4 * 7 * 1
    # Without sharing every row reads its own copy of the prompt.
    assert model_of(parts).decoding(sizes, shared=False)[0].bytes == 4 * (15 + 3 * (3 * 5 + 3)) + 4 * 7 * 3


def test_completions_of_one_token_are_not_decoded(parts: SimpleNamespace) -> None:
    assert model_of(parts).decoding(parts.counts.Sizes.even(1, 2, 5, 1)) == []


def test_an_update_counts_what_perf_mfu_counts(parts: SimpleNamespace) -> None:
    policy = policy_of()
    cost = Cost.from_policy(policy)
    assert cost is not None
    pack = rollouts_of([2, 4, 3, 3], prompt_lengths=[3, 3], group=[0, 0, 1, 1])
    sizes = parts.counts.Sizes(prompt_tokens=3, group_size=2, lengths=(2, 4, 3, 3))
    for shared in (True, False):
        found = model_of(parts, cost=cost).update(sizes, shared=shared)
        assert sum(part.operations for part in found.values()) == cost.of(pack, shares_prefix=shared)


def test_an_update_reads_weights_and_adds_to_gradients_once_per_pack(parts: SimpleNamespace) -> None:
    found = model_of(parts).update(parts.counts.Sizes.even(1, 2, 5, 3), packs=3, width=2)
    assert (found["trunk"].bytes, found["head"].bytes) == (3 * (2 * 2 + 2 * 4) * 10, 3 * (2 * 2 + 2 * 4) * 5)
    assert model_of(parts).optimizer().bytes == 7 * 4 * 15


def test_a_model_is_counted_from_its_configuration_alone(parts: SimpleNamespace) -> None:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16 + 2 * 8
    found = parts.counts.Model.from_config(config)
    assert found.parameters == 3 * layer + 8 + 11 * 8 == found.weights
    assert (found.cache, found.vocabulary) == (3 * 2 * 2 * 2, 11)
    assert found.cost == Cost(6.0 * (3 * layer + 8), 6.0 * 88, 12.0 * 3 * 8)
    config.tie_word_embeddings = False
    untied = parts.counts.Model.from_config(config)
    assert (untied.parameters, untied.weights) == (found.parameters + 88, found.weights)


def test_a_limit_is_what_binds_at_each_position(parts: SimpleNamespace) -> None:
    demands = (parts.counts.Demand(10.0, 1.0), parts.counts.Demand(10.0, 8.0))
    rates = parts.machine.Machine(products=5.0, reading=2.0, copying=3.0, updating=1.0)
    phase = parts.roofline.Phase("decoding", demands, 12.0)
    assert phase.limit(rates, writes=False) == 2.0 + 4.0
    assert phase.limit(rates, writes=True) == 2.0 + 8.0
    row = phase.row(rates)
    assert (row["operations"], row["bytes"], row["limit"], row["bound"]) == (20.0, 9.0, 6.0, "operations")
    assert parts.roofline.reached(row) == "50 %"
    optimizer = parts.roofline.Phase("optimizer", (parts.counts.Demand(0.0, 3.0),), 0.0).row(rates)
    assert (optimizer["limit"], optimizer["bound"], parts.roofline.reached(optimizer)) == (3.0, "bytes", "–")


@pytest.mark.whole
def test_a_tiny_step_gives_a_table_and_a_plot(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# T\n<!-- results -->\n<!-- /results -->\nEnd.\n")
    for name, path in {"README": readme, "RESULTS": tmp_path / "r.json", "PLOT": tmp_path / "r.png"}.items():
        monkeypatch.setattr(parts.roofline, name, path)
    sizes = ["--prompts", "2", "--group-size", "2", "--prompt-tokens", "9", "--steps", "1", "--seconds", "0", "--cpu"]
    parts.roofline.main([*sizes, "--new-tokens", "4", "--write"])
    assert "| 1M; 2 x 2, 9 + 4 | reading prompts |" in capsys.readouterr().out
    (record,) = json.loads((tmp_path / "r.json").read_text())
    phases = ["reading prompts", "decoding", "update: transformer", "update: head, objective", "optimizer"]
    assert record["sizes"] == "2 x 2, 9 + 4" and [row["phase"] for row in record["phases"]] == phases
    assert all(row["seconds"] > 0 and row["limit"] > 0 for row in record["phases"])
    text = readme.read_text()
    assert text.count("whole step") == 1 and text.endswith("<!-- /results -->\nEnd.\n")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
