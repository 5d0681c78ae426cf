import json
from pathlib import Path

import pytest
from helpers.fast import policy_of
from helpers.loading import load_tool
from helpers.tiny import tokenizer

from grpo_lightning import Request, Reward, RewardResult, Sampling, ScriptedEngine

tool = load_tool("label_segments")

ROW = {"question": "q1", "answer": "7", "completion": "abzcdze7"}


class EndsInGold(Reward):
    """Right is a completion whose last character is the gold answer."""

    def score(self, samples):
        return RewardResult([float(s.text.endswith(s.answer)) for s in samples], ["ok"] * len(samples))


def solution(row: dict, number: int, ends: list[int]):
    return tool.read(row, number, ends, policy_of(), "q{question}")


def test_fractions_of_completions_that_reach_the_gold_answer():
    seen: list[tuple[Request, str]] = []

    def script(request: Request, text: str) -> str:
        seen.append((request, text))
        return "7" if request.sample < {"ab": 3, "cd": 1}.get(text[-3:-1], 0) else "8"

    wrong = ROW | {"completion": "xyze8"}
    solutions = [solution(ROW, 0, [3, 6, 8]), solution(wrong, 1, [3, 5]), solution(ROW, 2, [8])]
    engine = ScriptedEngine(script)
    fractions = tool.label_prefixes(solutions, policy_of(), engine, EndsInGold(), Sampling(max_new_tokens=4), 4)
    assert fractions == [[0.75, 0.25, 1.0], [0.0, 0.0], [1.0]]
    assert [text for _, text in seen[::4]] == ["qq1abz", "qq1abzcdz", "qq1xyz"]
    assert all(request.token_ids == tokenizer().encode(text) for request, text in seen)
    assert len({request.prompt_id for request, _ in seen}) == 3


def test_the_command_line(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [ROW, ROW | {"completion": ""}, ROW | {"completion": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "labels.jsonl"
    options = ["--policy", str(policy_folder), "--out", str(out), "--num_completions", "2", "--pattern", "z"]
    tool.main(["--rows", str(tmp_path / "rows.jsonl"), *options, "--max_new_tokens", "4"])
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["completions"] for row in found] == [["abz", "cdz", "e7"], ["c"]]
    assert all(row["labels"] == [fraction > 0 for fraction in row["fractions"]] for row in found)
    assert found[1]["fractions"] == [0.0]
    assert "2 of 3 completions" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main(["--rows", str(tmp_path / "rows.jsonl"), *options, "--num_completions", "0"])
