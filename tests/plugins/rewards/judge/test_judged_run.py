"""Runs with a judge and programs, and what they show."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.loading import load_tool
from helpers.paths import ROOT
from helpers.programs import programs
from judging import Scripted, judging

from examples.code.scripted_judge import by_likeness
from grpo_lightning.plugins.looking.inspector.record import read

CODE = ROOT / "examples" / "code"


def command(folder: Path, server: Scripted) -> list[str]:
    options = {
        "trainer.default_root_dir": folder,
        "trainer.max_epochs": 1,
        "trainer.enable_progress_bar": "false",
        "trainer.limit_val_batches": 0,
        "model.policy.path": CODE / "policy",
        "data.task.train": CODE / "train.jsonl",
        "data.task.val": CODE / "val.jsonl",
        "loop.group_size": 4,
        "loop.prompts_per_step": 4,
        "completions.every_n_steps": 1,
        "inspect.every_n_steps": 1,
    }
    judge = {"url": server.url, "model": "m", "rubric": str(CODE / "rubric.txt"), "concurrency": 2}
    judge["cache"] = str(folder / "judge.sqlite")
    rewards = [
        {"class_path": "JudgeReward", "init_args": judge},
        {"class_path": "CodeReward", "init_args": {"partial_credit": True, "num_workers": 1}},
    ]
    given = [f"--{key}={value}" for key, value in options.items()]
    configs = [f"--config={CODE}/{name}.yaml" for name in ("run", "judge")]
    return ["fit", *configs, *given, f"--model.rewards={json.dumps(rewards)}"]


@pytest.mark.whole
def test_files_and_records_show_what_the_judge_said_and_which_tests_failed(tmp_path: Path) -> None:
    with (
        judging(lambda index, body: by_likeness(body)) as server,
        programs({"run": command(tmp_path / "run", server)}, tmp_path) as started,
    ):
        assert started["run"].wait() == 0, started["run"].errors
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    for line in lines:
        said = json.loads(line["notes"]["judge_reward"])
        assert said["score"] / 10 == pytest.approx(line["scores"]["judge_reward"])
        if line["statuses"]["code_reward"] != "no_answer":
            assert line["notes"]["code_reward"].startswith("test 1: ")
    completions = [one for group in read(tmp_path / "run")[0].groups for one in group.completions]
    assert completions and all("score" in one.notes["judge_reward"] for one in completions)
    assert any("test 3" in one.notes.get("code_reward", "") for one in completions)


def test_a_policy_is_made_with_questions_that_have_tests(tmp_path: Path) -> None:
    load_tool("make_code_policy").make(tmp_path, updates=1, layers=1)
    rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    for row in rows:
        program = row["answer"].strip("`\n")
        names: dict[str, Any] = {}
        exec(program, names)
        for test in row["tests"]:
            exec(test, names)
