"""Gold completions with what a run may have: an adapter, the inspector, the fast parts, shards, kills."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.fast import adapted, fit
from helpers.fitting import scalars
from helpers.killing import command, prepare
from helpers.paths import ROOT
from helpers.programs import programs

from grpo_lightning.maths.objective import Objective
from grpo_lightning.plugins.data.conversations.prompt_data import PromptDataModule
from grpo_lightning.plugins.looking.inspector import record
from grpo_lightning.plugins.looking.inspector.inspector import Inspector
from grpo_lightning.plugins.sources.demonstrations.demonstration_source import Demonstrations
from grpo_lightning.plugins.sources.demonstrations.demonstration_surrogates import LUFFY
from grpo_lightning.tasks.tables import JsonPrompts


def write_rows(folder: Path) -> Path:
    """Questions with worked solutions."""
    rows: list[dict[str, Any]] = [
        {"question": f"{row}a", "answer": str(row), "solution": "7c" * (row % 3) + "d"} for row in range(16)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_adapter_learns_and_the_inspector_sees_demonstrations(tmp_path: Path) -> None:
    task = JsonPrompts(train=str(write_rows(tmp_path)))
    policy = adapted()
    before = {name: value.clone() for name, value in policy.trained_state_dict().items()}
    fit(
        tmp_path / "run",
        [Inspector(every_n_steps=1)],
        {"source": Demonstrations("{solution}", fraction=0.25), "max_tokens": 60, "mu": 2},
        data=PromptDataModule(task),
        policy=policy,
        objective=Objective(LUFFY(), beta=0.1),
    )
    assert any((policy.trained_state_dict()[name] != value).any() for name, value in before.items())
    completions = [one for step in record.read(tmp_path / "run") for group in step.groups for one in group.completions]
    shown = [one for one in completions if one.statuses["digits"] == "demonstration"]
    assert len(shown) * 4 == len(completions) > 0
    assert {one.text for one in shown} <= {"d", "7cd", "7c7cd"}


def sft(folder: Path) -> list[str]:
    """The options of supervised fine-tuning on rows.jsonl, without validation."""
    task = {"class_path": "JsonPrompts", "init_args": {"train": str(write_rows(folder))}}
    more = [f"--config={ROOT / 'configs/warm_start.yaml'}", f"--data.task={json.dumps(task)}"]
    more += ["--loop.prompts_per_step=4", "--loop.steps_per_iteration=null", "--model.objective.beta=0"]
    return [*more, "--trainer.limit_val_batches=0"]


@pytest.mark.whole
def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    prepare(tmp_path)
    more = [*sft(tmp_path), "--model.policy.dropout=false", "--trainer.max_epochs=3"]
    strategies = {"one": [], "ddp": ["--trainer.devices=2", "--trainer.strategy=ddp"]}
    strategies["fsdp2"] = ["--trainer.devices=2", "--trainer.strategy=fsdp2"]
    for name, where in strategies.items():
        given = command(tmp_path / name, *more, *where)
        with programs({name: given}, tmp_path, anew=True) as started:
            assert started[name].wait() == 0, started[name].errors
    one, ddp, fsdp2 = (scalars(tmp_path / name)["policy/objective"] for name in strategies)
    assert len(one) == 3 and ddp == pytest.approx(one, rel=1e-5) and fsdp2 == pytest.approx(one, rel=1e-5)
