"""Conversations in whole runs: one turn is the task path, several are learned from, failures cost themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast import fit
from helpers.fitting import Digits, Echo, Gradients, Steps, scalars
from helpers.guessing import Guess, Once

from grpo_lightning import EnvironmentReward, Limits, NativeEngine, PromptDataModule, SampledCompletions, Sampling
from grpo_lightning.plugins.methods.process_supervision.process_supervision import ProcessSupervision

LETTERS = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ")
"""Each ends a turn: the tiny policy seldom draws a stop token."""


def test_an_environment_of_one_turn_is_the_task_path_bit_for_bit(tmp_path: Path) -> None:
    gradients = [Gradients(), Gradients()]
    task = fit(tmp_path / "task", [gradients[0]], trainer={"limit_val_batches": 1})
    data = PromptDataModule(Echo(), val_batch_size=5, environment=Once(), limits=Limits(max_turns=1))
    one = fit(tmp_path / "one", [gradients[1]], trainer={"limit_val_batches": 1}, data=data)
    for name, value in task.policy.state_dict().items():
        assert torch.equal(value, one.policy.state_dict()[name]), name
    for expected, actual in zip(gradients[0].updates, gradients[1].updates, strict=True):
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    logged = scalars(tmp_path / "one")
    expected_log = scalars(tmp_path / "task")
    assert repr({name: logged[name] for name in expected_log}) == repr(expected_log)  # NaN is not equal to itself


def test_a_game_is_played_over_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_rows, conversations = [], NativeEngine.conversations
    monkeypatch.setattr(NativeEngine, "conversations", lambda engine: kept_rows.append(1) or conversations(engine))
    kept, completions = Steps(), SampledCompletions(every_n_steps=1)
    data = PromptDataModule(Guess(), val_batch_size=5, limits=Limits(max_turns=3))
    options: dict[str, Any] = {
        "advantage": ProcessSupervision(),
        "rewards": [EnvironmentReward(), Digits(weight=0.1)],
        "sampling": Sampling(max_new_tokens=6, stop=LETTERS),
    }
    fit(tmp_path, [kept, completions], trainer={"limit_val_batches": 1}, data=data, **options)
    turns = [len(sample.conversation.ends) for one in kept.explorations for sample in one.samples]
    assert max(turns) > 1 and len(kept_rows) >= 3, "the engine keeps rows between turns"
    for one in kept.explorations:
        rollouts = one.rollouts
        drawn: dict[int, list[int]] = {}
        for row, ids in zip(
            rollouts.sample_index.tolist(), rollouts.token_ids.split(rollouts.lengths.tolist()), strict=True
        ):
            drawn[row] = drawn.get(row, []) + ids.tolist()
        assert drawn == {row: sample.token_ids for row, sample in enumerate(one.samples)}
        assert rollouts.sampler_logp is not None and rollouts.context is not None
    logged = scalars(tmp_path)
    assert set(logged["policy/logp_gap"].values()) and max(logged["policy/logp_gap"].values()) < 1e-4
    assert logged["rollout/turns"][2] == pytest.approx(sum(turns[-16:]) / 16)
    assert logged["rollout/environment_failed"][2] == 0
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert lines[0]["messages"][0] == {"role": "user", "content": "guess"}
