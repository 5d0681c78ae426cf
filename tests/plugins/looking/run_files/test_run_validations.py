"""The values of each question, as validations.jsonl has them."""

import json
import math
from pathlib import Path
from typing import Any

from grpo_lightning.plugins.looking.run_files.run_validations import VALIDATIONS, read_validations


def line(step: int, values: list[float | None], name: str = "", questions: str = "a", **changed: Any) -> str:
    row = {"name": name, "step": step, "grader": "MathVerifier", "questions": questions, "k": 8}
    return json.dumps(row | {"values": {"greedy": [1.0, 0.0], "avg@8": values}} | changed) + "\n"


def test_values_by_scalar_and_step(tmp_path: Path) -> None:
    lines = [line(-1, [0.5, None]), line(-1, [0.1, 0.2], "hard"), line(4, [0.5, 0.5]), line(4, [0.75, 1.0])]
    (tmp_path / VALIDATIONS).write_text("".join(lines) + line(9, [1.0, 1.0])[:30])
    values = read_validations(tmp_path)
    assert [*values] == ["val/greedy", "val/avg@8", "val/hard/greedy", "val/hard/avg@8"]
    assert values["val/avg@8"].by_step[4] == [0.75, 1.0]
    assert values["val/avg@8"].by_step[-1][0] == 0.5 and math.isnan(values["val/avg@8"].by_step[-1][1])
    assert values["val/hard/avg@8"].by_step == {-1: [0.1, 0.2]}
    assert values["val/avg@8"].grader == "MathVerifier"


def test_only_the_last_questions_count(tmp_path: Path) -> None:
    (tmp_path / VALIDATIONS).write_text(line(0, [0.5, 0.5]) + line(1, [0.1], questions="b"))
    assert read_validations(tmp_path)["val/avg@8"].by_step == {1: [0.1]}
    assert read_validations(tmp_path / "absent") == {}


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    (tmp_path / VALIDATIONS).write_text("")
    assert read_validations(tmp_path) == {}
    (tmp_path / VALIDATIONS).write_text("null\n[1]\n{}\n\n" + line(1, [0.1]))
    assert read_validations(tmp_path)["val/avg@8"].by_step == {1: [0.1]}
