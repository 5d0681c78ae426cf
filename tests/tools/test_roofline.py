"""experiments/roofline: counts of a step against numbers worked out by hand, the rates, the table and the plot."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.experiment import imported
from helpers.paths import ROOT
from helpers.tiny import policy_of, rollouts_of
from transformers import AutoConfig, LlamaConfig

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


def test_experts_are_refused(parts: SimpleNamespace) -> None:
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=9,
        num_local_experts=2,
    )
    with pytest.raises(ValueError, match="is a mixture of experts"):
        parts.counts.Model.from_config(config)


def test_qwen_on_an_h100(parts: SimpleNamespace) -> None:
    """Qwen2.5-0.5B, 32 prompts of 128 tokens x 8 completions of 512, 989 TFLOP/s and 3.35 TB/s, by hand."""
    from plan_sizes import config_of

    model = parts.counts.Model.from_config(config_of("0.5B"))
    assert model.parameters == 494_032_768
    sizes = parts.counts.Sizes.even(32, 8, 128, 512)
    operations, bandwidth = 989e12, 3.35e12
    decoding = parts.counts.total(model.decoding(sizes, width=2))
    rows, passes, seen = 256, 511, sum(128 + index + 1 for index in range(511))
    # 24 layers x 2 heads x 64 x keys and values x 2 bytes; 24 x 14 x 64 products of scores and values.
    cache, pair = 24 * 2 * 64 * 2 * 2, 4 * 24 * 14 * 64
    weights = 2 * 494_032_768
    own = rows * (seen - passes * 128)
    expected = passes * weights + cache * (32 * passes * 128 + own) + 4 * 151_936 * rows * passes
    assert decoding.bytes == expected
    assert expected / bandwidth == pytest.approx(0.151 + 0.131 + 0.024, abs=0.002)
    assert decoding.operations == rows * (passes * 2 * 494_032_768 + pair * seen)
    assert decoding.operations / operations == pytest.approx(0.135, abs=0.001)
    assert model.prefill(sizes, width=2).operations / operations == pytest.approx(0.003, abs=0.0002)
    update = parts.counts.total([*model.update(sizes, width=2).values()])
    # All pairs of tokens are counted, also those that the causal mask hides: 2 % more than 0.415 s.
    assert update.operations / operations == pytest.approx(0.424, abs=0.001)


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


def test_rates_are_rates(parts: SimpleNamespace) -> None:
    machine = parts.machine
    found = [
        machine.product_rate(4, 8, 16, seconds=0.0),
        machine.product_rate(4, 8, 16, torch.bfloat16, seconds=0.0),
        machine.read_rate(2**12, 0.0),
        machine.copy_rate(2**12, 0.0),
        machine.update_rate(2**12, 0.0),
        machine.thin_rate(3, [(8, 4), (4, 8)], seconds=0.0),
    ]
    assert all(rate > 0 for rate in found)


def test_the_fastest_of_several_times_counts(parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 4.0, 6.0, 6.0])
    monkeypatch.setattr(parts.machine, "now", lambda: next(clock))
    assert parts.machine.fastest(lambda: None, seconds=5.0) == 2.0


def test_weights_of_products(parts: SimpleNamespace) -> None:
    config = policy_of("llama").config
    shapes = parts.roofline.weight_shapes(config)
    assert shapes[:7] == [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    assert (len(shapes), shapes[-1]) == (2 * 7 + 1, (64, 32))


@pytest.mark.whole
def test_tiny_curves_give_a_table_and_a_plot(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = parts.curves.Point(prompts=2, group_size=2, prompt_tokens=4, new_tokens=4, hidden=32, layers=1)
    monkeypatch.setattr(parts.curves, "Point", lambda: tiny)
    (tmp_path / "performance.md").write_text("<!-- curves -->\n<!-- /curves -->\n")
    parts.curves.main(["--rounds", "1", "--scale", "32", "--out", str(tmp_path)])
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "performance.md").read_text().splitlines()]
    firsts = [row[0] for row in rows if len(row) == 7 and row[0] not in ("", "---", "what grows")]
    assert firsts[0].startswith("group_size") and firsts[-1] == "μ" and len(firsts) == 7
    assert (tmp_path / "performance.png").read_bytes()[:4] == b"\x89PNG"


def test_points_are_measured_in_turns_after_one_round_to_warm_up(
    parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []

    class Counting:
        def __init__(self, point: int) -> None:
            self.point, self.sampling, self.update = point, [], []

        def run(self) -> None:
            order.append(self.point)
            self.sampling.append(float(len(order)))
            self.update.append(2.0 * len(order))

    monkeypatch.setattr(parts.curves, "Bench", Counting)
    found = parts.curves.measure([7, 8, 7], rounds=3)
    assert order == [7, 8] * 4
    # Rounds 3, 5 and 7 of the first, 4, 6 and 8 of the second.
    assert found == {7: (5.0, 10.0), 8: (6.0, 12.0)}


def test_the_page_has_the_marks(parts: SimpleNamespace) -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "new tables" in parts.roofline.between(text, "curves", "new tables")


@pytest.mark.whole
def test_a_tiny_step_gives_a_table_and_a_plot(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# T\n<!-- results -->\n<!-- /results -->\nEnd.\n")
    for name, path in {"README": readme, "RESULTS": tmp_path / "r.json", "PLOT": tmp_path / "r.png"}.items():
        monkeypatch.setattr(parts.roofline, name, path)
    sizes = ["--prompts", "2", "--group-size", "2", "--prompt-tokens", "9", "--steps", "1", "--seconds", "0", "--cpu"]
    for tokens in ("4", "6"):
        parts.roofline.main([*sizes, "--new-tokens", tokens, "--write"])
    assert "| 1M; 2 x 2, 9 + 4 | reading prompts |" in capsys.readouterr().out
    records = json.loads((tmp_path / "r.json").read_text())
    assert [record["sizes"] for record in records] == ["2 x 2, 9 + 4", "2 x 2, 9 + 6"]
    for record in records:
        assert [row["phase"] for row in record["phases"]] == [
            "reading prompts",
            "decoding",
            "update: transformer",
            "update: head, objective",
            "optimizer",
        ]
        assert all(row["seconds"] > 0 and row["limit"] > 0 for row in record["phases"])
    text = readme.read_text()
    assert text.count("whole step") == 2 and text.endswith("<!-- /results -->\nEnd.\n")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


def test_the_readme_has_the_marks(parts: SimpleNamespace) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "new tables" in parts.roofline.between(text, "results", "new tables")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "--prompts 0: give 1 or more"),
        (["--group-size", "1"], "--group-size 1: give 2 or more"),
        (["--model", "nowhere"], "--model nowhere: there is no config.json"),
    ],
)
def test_mistakes(parts: SimpleNamespace, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parts.roofline.parse(arguments)
    assert message in capsys.readouterr().err
