"""`grpo-verify`: one pair, a file, and what it says."""

import io
import json
import subprocess
import sys
from contextlib import closing

import pytest
from helpers.paths import ROOT

from grpo_lightning.plugins.rewards.verifier.math_verifier import MathVerifier
from grpo_lightning.plugins.rewards.verifier.verify_command import main, read_row

ROWS = [
    {"gold": "18", "completion": "So #### 18", "id": "a"},
    {"gold": r"\sqrt{2}", "answer": r"\frac{2}{\sqrt{2}}", "expected": True},
    {"gold": "5", "answer": "2+3", "expected": True},
    {"answer": "7", "completion": r"<think>\boxed{7}</think> \boxed{8}"},
    {"gold": "7", "completion": r"\boxed{7}", "prompt": "q <think>"},
    {"gold": r"\frac{", "answer": "1"},
]


def lines(text: str) -> dict[str, str]:
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines()}


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (["1,000", "$1000"], 0, "ok $1000 numbers"),
        (["1/2", "0.5"], 0, "ok 0.5 worker"),
        (["5", "2+3"], 1, "ok 2+3 worker"),
        (["x^2-1", "(x-1)(x+1)"], 0, "ok (x-1)(x+1) worker"),
        (["x^2-1", "(x-1)^2"], 1, "ok (x-1)^2 worker"),
        (["Yes", "no"], 1, "ok no worker"),
        (["7", "7 maybe eleven"], 1, "unparseable 7 maybe eleven worker"),
        (["18", "It is 18.", "--completion"], 1, "no_answer None extraction"),
        (["", "5"], 1, "no_gold 5 gold"),
        (["x", "__import__('os')"], 1, "unparseable __import__('os') worker"),
        (["x", "x" * 3000], 1, f"too_long {'x' * 3000} guards"),
    ],
)
def test_a_pair_is_graded_and_explained(capsys, arguments, code, verdict):
    assert main(arguments) == code
    printed = lines(capsys.readouterr().out)
    assert printed["right"] == str(code == 0)
    assert f"{printed['status']} {printed['extracted']} {printed['stage']}" == verdict
    assert printed["why"]
    assert float(printed["ms"]) > 0


def test_a_completion_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("First 17.\n#### 18"))
    assert main(["--completion", "18", "-"]) == 0
    assert lines(capsys.readouterr().out)["extracted"] == "18"


def test_a_file_is_graded_as_in_training(capsys, tmp_path):
    file, out = tmp_path / "rows.jsonl", tmp_path / "graded.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["--jsonl", str(file), "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "2 of 6 right (33.3%)" in printed
    assert f"{file}:3: gold '5': wrong (status ok), extracted '2+3', decided by worker" in printed
    assert "as `expected`: 1 of 2" in printed
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{key: row[key] for key in before} for row, before in zip(graded, ROWS, strict=True)] == ROWS
    assert [row["right"] for row in graded] == [True, True, False, False, False, False]
    assert [row["status"] for row in graded] == ["ok", "ok", "ok", "ok", "no_answer", "gold_bad"]
    with closing(MathVerifier()) as verifier:
        result = verifier([read_row(json.dumps(row), "")[1] for row in ROWS])
    assert result.status == [row["status"] for row in graded]
    assert [value == 1.0 for value in result.value] == [row["right"] for row in graded]


def test_a_file_that_is_all_right(capsys, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n\n")
    assert main(["--jsonl", str(file)]) == 0
    assert "1 of 1 right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "rows.jsonl:1: no JSON"),
        ("[1]", "rows.jsonl:1: a list"),
        ('{"gold": "1"}', "has ['gold']; give `gold` with `completion`"),
        ("", "no rows"),
    ],
)
def test_a_file_that_cannot_be_graded(capsys, tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    assert main(["--jsonl", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["5"], ["5", "6", "--jsonl", "f"], ["5", "5", "--out", "f"], ["5", "5", "--timeout", "0"]]
)
def test_called_wrongly(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "grpo-verify: error: " in capsys.readouterr().err


def test_as_a_program(tmp_path):
    command = [sys.executable, "-m", "grpo_lightning.plugins.rewards.verifier.verify_command", "1/2", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal" in done.stdout


def test_it_is_a_command_of_the_package():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'grpo-verify = "grpo_lightning.plugins.rewards.verifier.verify_command:main"' in pyproject
