"""The verifier on whole collections of answers: attacks, and text that nobody wrote for a verifier.

Our own collections are beside this file: `cases.jsonl` (answers by kinds of mistake) and `natural.jsonl` (solutions as
people write them). A case whose only fault is prose outside its answer is marked `prose`: such words are not read, so
it does not count. `prose.jsonl` marks these cases of the shared attacks.
"""

import json
import time
from pathlib import Path
from typing import Any

import bench_verifier
import pytest
from helpers.paths import DATA, needs_math_cases

from grpo_lightning.plugins.rewards.verifier.math_verifier import MathVerifier
from grpo_lightning.plugins.rewards.verifier.value_comparison import compare
from grpo_lightning.types import FinishReason, Prompt, Question, Sample

OWN = Path(__file__).with_name("cases.jsonl")
SHARED = DATA / "math_cases" / "cases.jsonl"

Case = dict[str, Any]


def cases(path: Path) -> list[Case]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sample(case: Case) -> Sample:
    text = case.get("completion", rf"So it is $\boxed{{{case.get('answer')}}}$.")
    question = case.get("question", "q")
    return Sample(Prompt(0, question, [1], Question(question, case["gold"])), text, [1], FinishReason.STOP)


def wrong(verifier: MathVerifier, rows: list[Case]) -> list[Case]:
    values = verifier([sample(row) for row in rows]).value
    return [row for row, value in zip(rows, values, strict=True) if (value == 1.0) != row["expected"]]


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier()
    verifier.read_questions([])
    yield verifier
    verifier.close()


def test_own_cases(verifier):
    rows = [row for row in cases(OWN) if not row.get("prose")]
    assert len(rows) > 1000
    assert 0.3 < sum(row["expected"] for row in rows) / len(rows) < 0.7
    given_up = [row for row in rows if row.get("given_up")]
    assert len(given_up) <= 0.02 * len(rows)
    assert wrong(verifier, rows) == given_up


def test_words_around_an_answer_are_not_read(verifier):
    rows = [row for row in cases(OWN) if row.get("prose")]
    assert len(rows) > 50
    assert not any(row["expected"] for row in rows)
    assert wrong(verifier, rows) == rows


def test_natural_text(verifier):
    rows = cases(OWN.with_name("natural.jsonl"))
    assert len(rows) >= 40
    right = [row | {"expected": True} for row in rows]
    of_other_gold = [row | {"gold": row["other"], "expected": False} for row in rows]
    assert wrong(verifier, right + of_other_gold) == []


def test_own_outcomes():
    rows = [row for row in cases(OWN) if "outcome" in row]
    assert {row["outcome"] for row in rows} == {"equal", "different", "restated", "unparseable", "gold_bad"}
    assert [row for row in rows if compare(row["gold"], row["answer"], row["question"]) != row["outcome"]] == []


@needs_math_cases
def test_shared_cases(verifier):
    rows = [row for row in cases(SHARED) if not row["hostile"] and not row["ambiguous"]]
    missed = wrong(verifier, rows)
    assert [row["id"] for row in missed if not row["expected"]] == []
    assert 1 - len(missed) / len(rows) >= 0.97, [row["id"] for row in missed]


LARGEST_RATES = {
    "MATH": 0.005, "Qwen2.5-Math": 0.003, "Minerva": 0.03, "suites": 0.01, "attack 1": 0.04,
    "attack 2, phrasings R": 0.017, "attack 2, natural N": 0.012, "attack 2, late L": 0.12,
    "attack 2, wrong W": 0, "golds of other rows": 0,
}  # fmt: skip
"""The largest fraction of the right answers of each set that may be rejected."""


@pytest.mark.parametrize("name", LARGEST_RATES)
def test_rates_on_shared_answers(verifier, name):
    sets = bench_verifier.labelled_sets(DATA)
    if name not in sets:
        pytest.skip(f"set GRPO_TEST_DATA to a folder with the answers of {name!r} to run it")
    rejected, accepted = bench_verifier.mistakes(verifier, sets[name])
    num_right = sum(case.is_right for case in sets[name])
    assert len(rejected) <= LARGEST_RATES[name] * num_right, rejected
    largest_accepted = 0.01 if name.startswith("attack") else 0.001
    assert len(accepted) <= largest_accepted * (len(sets[name]) - num_right), accepted


@needs_math_cases
def test_shared_hostile_cases(verifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [row for row in cases(SHARED) if row["hostile"]]
    assert len(rows) > 20
    for row in rows:
        start = time.monotonic()
        assert wrong(verifier, [row]) == []
        assert time.monotonic() - start < 2.5, row["id"]
        assert verifier([sample({"gold": "x+y", "answer": "y+x"})]).value == [1.0]
    assert list(tmp_path.iterdir()) == []
