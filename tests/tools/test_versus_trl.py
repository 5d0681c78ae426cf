"""experiments/versus_trl without TRL: sizes, prompts, the limit on memory, and the tables."""

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
def test_a_process_whose_child_is_over_the_limit_is_killed(parts: SimpleNamespace, tmp_path: Path):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ALLOCATE!r}])"
    ended = parts.memory_limit.run([sys.executable, "-c", code], 2**27, os.environ, tmp_path / "log")
    assert ended.exceeded and ended.returncode == -9
    assert 2**27 < ended.peak < 2 * GIB


def test_operations_of_sampling(parts: SimpleNamespace):
    # Two groups of four, prompts of 5 tokens, 3 drawn: the prompts once, then two of the three drawn in each row. The
    # first is seen by itself and 5 others, the second by itself and 6.
    tokens, heads, pairs = 2 * 5 + 8 * 2, 2 + 8 * 2, 2 * 25 + 8 * (6 + 7)
    found = parts.sides.sampling_operations(Cost(token=300.0, drawn=30.0, pair=3.0), race_of(parts))
    assert found == 100 * tokens + 10 * heads + pairs


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


def ended_with(parts: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Lets processes end with what is given, instead of running."""
    ended = {"returncode": 0, "peak": GIB, "exceeded": False, "tokens": [64, 64], "seconds": [1.0]} | changes

    def run(command: list[str], limit: float, environment: Any, log: Path) -> Any:
        log.write_text("why")
        (folder / f"{command[2]}.json").write_text(json.dumps(ended))
        return parts.memory_limit.Ended(ended["returncode"], ended["peak"], ended["exceeded"])

    monkeypatch.setattr(parts.memory_limit, "run", run)


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
