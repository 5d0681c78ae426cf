"""The regimes of experiments/versus_trl: lengths that both sides are made to have, phases, the table and the plot."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.experiment import imported
from helpers.paths import ROOT
from helpers.tiny import policy_of, requests_of
from transformers import GenerationConfig

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.fast import batch
from grpo_lightning.types import FinishReason, RandomKey

FOLDER = ROOT / "experiments" / "versus_trl"
GIB = 2**30


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    with imported("versus_trl", "roofline") as modules:
        yield modules


def test_lengths_are_a_function_of_the_step(parts: SimpleNamespace) -> None:
    lengths = parts.forced_lengths.lognormal_lengths
    assert lengths(3, 16, 100) == lengths(3, 16, 100) != lengths(4, 16, 100)
    many = sorted(lengths(0, 4000, 100))
    # The median is a quarter of the longest; exp(N(0, 1)) exceeds 4 in 8.3 % of the draws.
    assert many[2000] == pytest.approx(25, abs=2)
    assert (many[0], many[-1]) == (1, 100)
    assert many.count(100) / 4000 == pytest.approx(0.083, abs=0.02)


def test_our_completions_end_at_their_lengths_and_say_what_the_policy_does(parts: SimpleNamespace) -> None:
    policy = policy_of()
    requests = requests_of([5, 9], 3)
    wanted = {0: [1, 4, 12, 7, 2, 9], 1: [3] * 6}
    with parts.forced_lengths.marking_policies():
        assert policy.stop_ids == {1}
        engine = parts.forced_lengths.forcing_engine(lambda step: wanted[step], check_every=4)
        engine.sync(policy)
        for step, lengths in wanted.items():
            found = engine.complete(requests, Sampling(max_new_tokens=12), RandomKey(0, step))
            assert [len(completion.token_ids) for completion in found] == lengths
            assert {completion.finish_reason for completion in found} == {FinishReason.STOP}
            tokens = [completion.token_ids for completion in found]
            assert all(row[-1] == 1 and 1 not in row[:-1] for row in tokens)
            groups = [index // 3 for index in range(6)]
            rollouts = Rollouts.from_lists([requests[0].token_ids, requests[3].token_ids], groups, tokens)
            logp = [value for completion in found for value in completion.logp]
            torch.testing.assert_close(policy(rollouts).logp, torch.tensor(logp), atol=1e-5, rtol=1e-4)
    # Nothing of it stays.
    assert policy.stop_ids == {3, 5}
    assert batch.draw.__module__ == "grpo_lightning.engines.sampling"
    assert batch.uniforms.__module__ == "grpo_lightning.engines.philox"


def test_trl_is_made_to_end_its_rows_at_their_lengths(parts: SimpleNamespace) -> None:
    """A trainer with the two members that are changed, and transformers' own `generate`."""
    wanted = {0: [2, 6, 3, 5], 1: [4, 1, 1, 4]}
    model: Any = policy_of().model
    shapes: list[tuple[int, ...]] = []

    class Trainer:
        accelerator = SimpleNamespace(device=torch.device("cpu"))

        def __init__(self) -> None:
            self.model = model

        def _generate_single_turn(self, prompt_ids: Any) -> Any:
            config = GenerationConfig(max_new_tokens=6, do_sample=True, eos_token_id=63, pad_token_id=0)
            rows = self.model.generate(input_ids=prompt_ids, generation_config=config)[:, prompt_ids.shape[1] :]
            shapes.append(tuple(rows.shape))
            return rows.tolist(), None

    trainer = Trainer()
    parts.forced_lengths.stopping(trainer, lambda step: wanted[step])
    try:
        for lengths in wanted.values():
            rows, logps = trainer._generate_single_turn(torch.randint(6, 60, (4, 7)))
            assert [len(row) for row in rows] == [min(n, len(row)) for n, row in zip(lengths, rows, strict=True)]
            assert logps is None
    finally:
        del model.generate
    # Generation ends with the longest row.
    assert shapes == [(4, 6), (4, 4)]


def race_of(parts: SimpleNamespace, **changes: Any) -> Any:
    sizes = {"prompt_tokens": 5, "new_tokens": 8, "prompts": 2, "group_size": 4, "warm_up": 1, "steps": 3}
    return parts.race.Race(**sizes | {"max_tokens": 100, "trl_rows": 8} | changes)


def test_a_race_knows_the_tokens_of_each_step(parts: SimpleNamespace) -> None:
    assert race_of(parts).tokens(0) == 8 * (5 + 8)
    race = race_of(parts, lognormal=True, precision="bf16")
    assert race.lengths(2) == parts.forced_lengths.lognormal_lengths(2, 8, 8)
    assert race.tokens(2) == 8 * 5 + sum(race.lengths(2)) < race_of(parts).tokens(2)
    assert race.name == "5 + up to 8, bf16"
    assert parts.race.Race.from_json(race.to_json()) == race


def test_operations_of_sampling_rows_that_end(parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_lightning.training.throughput import Cost

    race = race_of(parts, lognormal=True, prompts=1, group_size=2)
    monkeypatch.setattr(parts.race, "lognormal_lengths", lambda step, rows, longest: [1, 3])
    # The prompt once; then the longer row alone, twice: it sees 6 tokens and 7.
    found = parts.sides.sampling_operations(Cost(token=300.0, drawn=30.0, pair=3.0), race)
    assert found == 100 * (5 + 2) + 10 * (1 + 2) + (25 + 6 + 7)


def records(parts: SimpleNamespace) -> list[dict[str, Any]]:
    """A race that both ended, and one that TRL did not."""
    outcome = parts.result_tables.Outcome
    phases = dict(zip(parts.stopwatches.PHASES, (0.5, 0.1, 0.0, 1.0, 0.25), strict=True))
    own = outcome([2.0, 2.5, 2.0], GIB, False, {"phases": phases})
    other = outcome([5.0, 5.0], 3 * GIB, False, {"phases": phases})
    killed = outcome([], 20 * GIB, True)
    race = parts.regimes.record_of("1M", race_of(parts, regime="short"), {"ours": own, "trl": other}, "a note")
    long = race_of(parts, regime="long-answer", lognormal=True, precision="bf16")
    return [race, parts.regimes.record_of("1M", long, {"ours": own, "trl": killed}, "a note")]


def test_the_table_has_the_phases_of_both_sides(parts: SimpleNamespace) -> None:
    rows = parts.regimes.regime_table(records(parts)).splitlines()[2:]
    assert rows == [
        "| 1M | short | fp32 | 2 x 4, 5 + 8 | grpo_lightning | 2.00 | **2.50** | 0.50 | 0.10 | 0.00 | 1.00 | 0.25 | "
        "0.15 | 1.0 |",
        "|  |  |  |  | TRL | 5.00 |  | 0.50 | 0.10 | 0.00 | 1.00 | 0.25 | 3.15 | 3.0 |",
        "| 1M | long-answer | bf16 | 2 x 4, 5 + up to 8 | grpo_lightning | 2.00 | – | 0.50 | 0.10 | 0.00 | 1.00 | "
        "0.25 | 0.15 | 1.0 |",
        "|  |  |  |  | TRL | – |  | – | – | – | – | – | – | more than 20.0 |",
    ]


def test_written_are_records_table_and_plot(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in {"README": "README.md", "RECORDS": "regimes.json", "PLOT": "regimes.png"}.items():
        monkeypatch.setattr(parts.compare, name, tmp_path / file)
    (tmp_path / "README.md").write_text("# T\n<!-- regimes -->\n<!-- /regimes -->\nEnd.\n")
    for record in records(parts):
        parts.compare.write_regimes([record])
    assert len(json.loads((tmp_path / "regimes.json").read_text())) == 2
    text = (tmp_path / "README.md").read_text()
    assert text.count("| TRL |") == 2 and text.count("a note.") == 1 and text.endswith("End.\n")
    assert (tmp_path / "regimes.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.whole
def test_our_side_of_a_regime_with_lognormal_lengths(
    parts: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sizes = ["--prompt-tokens", "6", "--new-tokens", "12", "--prompts", "2", "--group-size", "4"]
    runs = ["--steps", "2", "--warm-up", "1", "--rounds", "1", "--only", "ours"]
    parts.compare.main(["--regime", "long-answer", "--precision", "bf16", *sizes, *runs])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1M | long-answer")]
    cells = row.strip("| ").split(" | ")
    assert cells[3:5] == ["2 x 4, 6 + up to 12", "grpo_lightning"]
    assert all(float(cell) >= 0 for cell in cells[7:])
