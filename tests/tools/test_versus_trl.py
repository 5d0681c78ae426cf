"""experiments/versus_trl without TRL: sizes, prompts, the limit on memory, the tables, and our side of a small race."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.experiment import imported
from helpers.paths import ROOT
from helpers.tiny import policy_of, tokenizer

from grpo_lightning.policy.policy import Policy
from grpo_lightning.training.throughput import Cost

FOLDER = ROOT / "experiments" / "versus_trl"
GIB = 2**30
SIZES = {"prompts": 2, "group_size": 4, "warm_up": 1, "steps": 3, "max_tokens": 100, "trl_rows": 8}


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    with imported("versus_trl", "roofline") as modules:
        yield modules


def race_of(parts: SimpleNamespace, prompt_tokens: int = 5, new_tokens: int = 3) -> Any:
    return parts.race.Race(prompt_tokens=prompt_tokens, new_tokens=new_tokens, **SIZES)


def test_a_race_survives_the_way_to_another_process(parts: SimpleNamespace):
    race = race_of(parts)
    assert parts.race.Race.from_json(race.to_json()) == race
    assert (race.rows, race.tokens(0), race.name) == (8, 64, "5 + 3")


def test_defaults_belong_to_the_model(parts: SimpleNamespace, policy_folder: Path):
    small, real = parts.compare.parse([]), parts.compare.parse(["--model", str(policy_folder), "--steps", "7"])
    assert (small.prompt_tokens, small.new_tokens, small.prompts, small.trl_rows) == ([32], 64, 32, 256)
    assert (small.warm_up, small.steps, small.rounds, small.max_tokens) == (3, 10, 2, 8192)
    assert (real.prompt_tokens, real.new_tokens, real.prompts, real.trl_rows) == ([63, 490], 32, 4, 32)
    assert (real.warm_up, real.steps, real.rounds, real.memory_limit) == (1, 7, 1, 20)
    assert [race.prompt_tokens for race in parts.compare.races_of(real)] == [63, 490]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: give 1 or more"),
        (["--prompt-tokens", "5", "0"], "--prompt-tokens 0: give 1 or more"),
        (["--group-size", "1"], "--group-size 1: give 2 or more"),
        (["--trl-rows", "24"], "--trl-rows 24: give a multiple of --group-size=8 that divides the 256 completions"),
        (["--prompts", "2", "--trl-rows", "4"], "--trl-rows 4: give a multiple of --group-size=8"),
        (["--write"], "--write: README.md has marks for the tables of a real model alone; give --model"),
        (["--model", "nowhere"], "--model nowhere: there is no config.json; give a model's folder"),
    ],
)
def test_mistakes(parts: SimpleNamespace, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parts.compare.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0.0), ("abd", 2 / 3), ("w2 w²", 3 / 5), ("\ud800\x00", 1.0), ("�é😀", 1 / 3), ("٣", 0.0)],
)
def test_any_text_has_a_reward(parts: SimpleNamespace, text: str, expected: float):
    assert parts.race.even_fraction(text) == pytest.approx(expected)


def test_english_prompts_have_exactly_the_tokens_asked_for(parts: SimpleNamespace):
    prompts = parts.race.english_prompts(6, 70, tokenizer())
    assert [len(tokenizer().encode(prompt)) for prompt in prompts] == [70] * 6
    assert len(set(prompts)) == 6
    assert prompts == parts.race.english_prompts(6, 70, tokenizer())


def test_prompts_that_cannot_be_made_are_refused(parts: SimpleNamespace):
    even = SimpleNamespace(encode=lambda text: [0] * (2 * len(text.split())))
    with pytest.raises(ValueError, match="make 7 tokens of this tokenizer: give more --prompt-tokens"):
        parts.race.english_prompts(1, 7, even)


def test_an_endless_model_is_the_same_model(parts: SimpleNamespace, policy_folder: Path, tmp_path: Path):
    parts.race.make_endless(policy_folder, tmp_path / "model")
    before, endless = Policy(str(policy_folder)), Policy(str(tmp_path / "model"))
    before.load()
    endless.load()
    assert all((a == b).all() for a, b in zip(before.parameters(), endless.parameters(), strict=True))
    assert before.stop_ids and min(before.stop_ids) < before.config.vocab_size
    assert min(endless.stop_ids) >= endless.config.vocab_size
    assert endless.tokenizer.encode("abc") == before.tokenizer.encode("abc")
    assert endless.tokenizer.pad_token_id < endless.config.vocab_size


ALLOCATE = "held = [bytearray(b'1' * 2**24) for _ in range(64)]; import time; time.sleep(60)"
"""One GiB, and no end."""


@pytest.mark.whole
@pytest.mark.parametrize("where", ["itself", "its child"])
def test_a_process_over_the_limit_is_killed(parts: SimpleNamespace, where: str, tmp_path: Path):
    code = ALLOCATE
    if where == "its child":
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ALLOCATE!r}])"
    ended = parts.memory_limit.run([sys.executable, "-c", code], 2**27, os.environ, tmp_path / "log")
    assert ended.exceeded and ended.returncode == -9
    assert 2**27 < ended.peak < 2 * GIB


@pytest.mark.whole
def test_a_process_is_killed_before_the_machine_has_no_memory(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parts.memory_limit, "RESERVE", 2**60)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert parts.memory_limit.run(command, 2**60, os.environ, tmp_path / "log").exceeded


@pytest.mark.whole
def test_a_process_within_the_limit_ends_by_itself(parts: SimpleNamespace, tmp_path: Path):
    code = "import os; held = b'1' * 2**26; print(os.environ['WORD']); raise SystemExit(3)"
    environment = os.environ | {"WORD": "hello"}
    ended = parts.memory_limit.run([sys.executable, "-c", code], GIB, environment, tmp_path / "log")
    assert (ended.returncode, ended.exceeded) == (3, False)
    assert (tmp_path / "log").read_text() == "hello\n"


def test_operations_of_sampling(parts: SimpleNamespace):
    # Two groups of four, prompts of 5 tokens, 3 drawn: the prompts once, then two of the three drawn in each row. The
    # first is seen by itself and 5 others, the second by itself and 6.
    tokens, heads, pairs = 2 * 5 + 8 * 2, 2 + 8 * 2, 2 * 25 + 8 * (6 + 7)
    found = parts.sides.sampling_operations(Cost(token=300.0, drawn=30.0, pair=3.0), race_of(parts))
    assert found == 100 * tokens + 10 * heads + pairs


def test_operations_of_sampling_are_a_third_of_those_of_learning(parts: SimpleNamespace):
    policy = policy_of()
    cost = Cost.from_policy(policy)
    assert cost is not None
    # One token drawn per completion: nothing but the prompts is passed.
    weights = sum(p.numel() for p in policy.model.model.layers.parameters()) + policy.config.hidden_size
    heads = policy.config.vocab_size * policy.config.hidden_size
    layers, width = policy.config.num_hidden_layers, policy.config.num_attention_heads * policy.config.head_dim
    expected = 2 * (weights * 10 + heads * 2) + 4 * layers * width * 50
    assert parts.sides.sampling_operations(cost, race_of(parts, 5, 1)) == pytest.approx(expected)


def test_the_rate_of_products_is_one(parts: SimpleNamespace):
    assert parts.sides.product_rate(size=16, seconds=0.01) > 0


def outcomes(parts: SimpleNamespace) -> dict[Any, Any]:
    """Two races: one that both sides end, one that TRL does not."""
    outcome = parts.result_tables.Outcome
    details = {
        "phases": {"sampling": 0.5, "reward": 0.0, "log-probs": 0.0, "forward and backward": 1.0, "optimizer": 0.25},
        "operations": {"sampling": 2e9, "forward and backward": 8e9},
        "products_per_second": 10e9,
        "seconds": [2.0, 2.0],
        "threads": 2,
    }
    own = outcome([2.0, 1.5, 2.5], GIB, False, details)
    return {
        race_of(parts): {"ours": own, "trl": outcome([5.0, 5.0], 3 * GIB)},
        race_of(parts, 50): {"ours": own, "trl": outcome([], 20 * GIB, True)},
        race_of(parts, 60): {"ours": outcome(), "trl": outcome()},
    }


def test_the_comparison_has_a_row_per_race(parts: SimpleNamespace):
    rows = parts.result_tables.comparison(outcomes(parts)).splitlines()[2:]
    assert rows == [
        "| 5 + 3 | 2.00 (1.50 to 2.50) | 5.00 (5.00 to 5.00) | 2.50 | 1.0 | 3.0 |",
        "| 50 + 3 | 2.00 (1.50 to 2.50) | – | – | 1.0 | more than 20.0 |",
        "| 60 + 3 | – | – | – | – | – |",
    ]


def test_the_phases_with_what_they_reach(parts: SimpleNamespace):
    rows = parts.result_tables.where_time_goes(outcomes(parts)).splitlines()[2:]
    # 2 of 10 GFLOP/s x 0.5 s; 8 of 10 x 1 s; 0.25 of 2 seconds are in no phase.
    assert rows[0] == "| 5 + 3 | 0.50 | 0.00 | 0.00 | 1.00 | 0.25 | 0.25 | 10 | 40 % | 80 % |"
    assert rows[2] == "| 60 + 3 | – | – | – | – | – | – | – | – | – |"


def test_a_dry_run_prints_command_lines_and_empty_tables(parts: SimpleNamespace, capsys: pytest.CaptureFixture[str]):
    parts.compare.main(["--model", "runs/smollm2", "--write", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert [f"sides.py {side} FOLDER" in line for side, line in zip(["ours", "trl"] * 2, lines, strict=False)] == [
        True
    ] * 4
    assert "| 490 + 32 | – | – | – | – | – |" in lines


def test_the_readme_has_the_marks(parts: SimpleNamespace):
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "new tables" in parts.compare.inserted(text, "new tables")


def ended_with(parts: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Lets processes end with what is given, instead of running."""
    ended = {"returncode": 0, "peak": GIB, "exceeded": False, "tokens": [64, 64], "seconds": [1.0]} | changes

    def run(command: list[str], limit: float, environment: Any, log: Path) -> Any:
        log.write_text("why")
        (folder / f"{command[2]}.json").write_text(json.dumps(ended))
        return parts.memory_limit.Ended(ended["returncode"], ended["peak"], ended["exceeded"])

    monkeypatch.setattr(parts.memory_limit, "run", run)


def test_rounds_add_up(parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    outcome = parts.result_tables.Outcome()
    for seconds, peak in ((1.0, 3), (2.0, 2)):
        ended_with(parts, tmp_path, monkeypatch, seconds=[seconds], peak=peak)
        parts.compare.run_side("trl", tmp_path, race_of(parts), GIB, outcome, exact=True)
    assert (outcome.seconds, outcome.peak, outcome.median) == ([1.0, 2.0], 3, 1.5)


def test_a_side_that_passed_other_tokens_is_refused(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended_with(parts, tmp_path, monkeypatch, tokens=[64, 63])
    outcome = parts.result_tables.Outcome()
    parts.compare.run_side("ours", tmp_path, race_of(parts), GIB, outcome, exact=False)
    with pytest.raises(parts.compare.Failure, match=r"grpo_lightning had \[64, 63\] tokens per step, not \[64, 64\]"):
        parts.compare.run_side("ours", tmp_path, race_of(parts), GIB, outcome, exact=True)


def test_a_side_that_fails_says_why(parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended_with(parts, tmp_path, monkeypatch, returncode=1)
    with pytest.raises(parts.compare.Failure, match=r"TRL failed at 5 \+ 3 tokens:\nwhy"):
        parts.compare.run_side("trl", tmp_path, race_of(parts), GIB, parts.result_tables.Outcome(), exact=True)


@pytest.mark.whole
def test_our_side_of_a_race_with_a_real_model(
    parts: SimpleNamespace, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    readme = tmp_path / "README.md"
    readme.write_text("# T\n<!-- results -->\n<!-- /results -->\nEnd.\n")
    monkeypatch.setattr(parts.compare, "README", readme)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sizes = ["--prompt-tokens", "12", "--new-tokens", "4", "--prompts", "2", "--group-size", "4", "--steps", "2"]
    parts.compare.main(["--model", str(policy_folder), "--only", "ours", "--write", *sizes])
    lines = readme.read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| 12 + 4 |")]
    assert [len(row) for row in rows] == [6, 10]
    assert rows[0][2] == "–" and float(rows[0][4]) > 0.1
    assert all(float(seconds) >= 0 for seconds in rows[1][1:8])
    assert lines[-1] == "End." and "torch " in lines[-3]
