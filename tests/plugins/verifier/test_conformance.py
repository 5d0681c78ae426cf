"""The verifier on whole collections of answers: our own, and the shared ones where they are."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import DATA, needs_math_cases

from grpo_lightning.plugins.verifier.comparison import compare
from grpo_lightning.plugins.verifier.math_verifier import MathVerifier
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
    rows = cases(OWN)
    assert len(rows) > 1000
    assert 0.3 < sum(row["expected"] for row in rows) / len(rows) < 0.7
    given_up = [row for row in rows if row.get("given_up")]
    assert len(given_up) <= 0.02 * len(rows)
    assert wrong(verifier, rows) == given_up


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


@needs_math_cases
def test_shared_attack(verifier):
    rows = [row for row in cases(SHARED.with_name("attack.jsonl")) if not row["ambiguous"]]
    missed = wrong(verifier, rows)
    accepted = [(row["gold"], row["completion"]) for row in missed if not row["expected"]]
    rejected = [(row["gold"], row["completion"]) for row in missed if row["expected"]]
    assert len(accepted) <= 0.003 * sum(not row["expected"] for row in rows), accepted
    assert len(rejected) <= 0.04 * sum(row["expected"] for row in rows), rejected


@needs_math_cases
def test_shared_attack_by_kind(verifier):
    rows = [row for row in cases(SHARED.with_name("attack_2.jsonl")) if not row["ambiguous"]]
    missed = {id(row) for row in wrong(verifier, rows)}
    for kind, largest in {"W": 0.015, "R": 0.02, "N": 0.01, "L": 0.12}.items():
        of_kind = [row for row in rows if row["category"].startswith(kind)]
        failed = [(row["gold"], row["completion"][-80:]) for row in of_kind if id(row) in missed]
        assert len(failed) <= largest * len(of_kind), failed


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
