"""Validation that draws otherwise than training: other filters, other lengths."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Grpo
from helpers.fitting import Digits, fit, scalars
from helpers.tiny import policy_of

from grpo_lightning.engines.base import Drawn
from grpo_lightning.engines.sampling import Sampling, ValidationSampling
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import UsageError

TRAINING = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.8, stop=["ab"])


def test_what_is_not_given_is_as_in_training() -> None:
    assert ValidationSampling().over(TRAINING) == TRAINING
    longer = ValidationSampling(max_new_tokens=99, temperature=0.3, top_k=4, min_p=0.1).over(TRAINING)
    assert longer == Sampling(99, temperature=0.3, top_k=4, top_p=0.8, min_p=0.1, stop=["ab"])
    assert ValidationSampling(stop=[], top_p=1.0).over(TRAINING) == replace(TRAINING, stop=[], top_p=1.0)


def test_a_value_out_of_range_is_named_by_its_key() -> None:
    with pytest.raises(UsageError, match=r"^val_sampling.min_p=2: "):
        ValidationSampling(min_p=2).over(TRAINING)


class Watched(NativeEngine):
    """Notes the sampling of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Sampling] = []

    def check(self, policy: Any, sampling: Sampling) -> None:
        super().check(policy, sampling)
        self.asked.append(sampling)

    def generate(self, requests: Any, sampling: Sampling, *args: Any, **kwargs: Any) -> Drawn:
        self.asked.append(sampling)
        return super().generate(requests, sampling, *args, **kwargs)


def test_training_and_validation_draw_each_as_it_is_told(tmp_path: Path) -> None:
    engine, training = Watched(), Sampling(max_new_tokens=6)
    val = ValidationSampling(max_new_tokens=20, temperature=0.5, top_k=7)
    fit(tmp_path, engine=engine, sampling=training, val_sampling=val,
        trainer={"max_epochs": 1, "limit_val_batches": 1})  # fmt: skip
    drawn = Sampling(max_new_tokens=20, temperature=0.5, top_k=7)
    greedy = replace(drawn, temperature=0.0)
    # The check is for the longest; then the step, and a validation before it and after.
    assert engine.asked[0] == drawn
    assert {*map(str, engine.asked[1:])} == {*map(str, (greedy, drawn, training))}
    assert engine.asked.count(training) == 1
    found = scalars(tmp_path)
    assert max(found["val/length"].values()) > 6 >= max(found["rollout/length_max"].values())


def test_greedy_completions_alone_may_be_asked_for() -> None:
    module = GRPOModule(policy_of(), [Digits()], val_sampling=ValidationSampling(temperature=0.0), val_samples=1)
    assert module.val_sampling.greedy and not module.sampling.greedy
    with pytest.raises(UsageError, match="training needs completions that differ"):
        GRPOModule(policy_of(), [Digits()], sampling=Sampling(temperature=0.0))


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_by_the_command_line(grpo: Grpo, tmp_path: Path, subcommand: str) -> None:
    options = ["--model.val_sampling.max_new_tokens=9", "--model.val_sampling.temperature=0", "--loop.group_size!",
               "--loop.prompts_per_step!", "--data.task.predict=rows.jsonl"]  # fmt: skip
    if subcommand != "predict":
        options += ["--data.task.train!"]
    code, out, errors = grpo(subcommand, *options, "--trainer.max_epochs!")
    assert code == 0, errors
    if subcommand == "predict":
        lines = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
        texts = [line["completion"] for line in lines]
        assert texts[0::2] == texts[1::2]  # two greedy ones per question
        assert max(map(len, texts)) > 4
    else:
        shown = {row.split("│")[1].strip(): float(row.split("│")[2]) for row in out.splitlines() if row.count("│") == 3}
        name = {"validate": "val", "test": "test"}[subcommand]
        assert shown[f"{name}/length"] > 4
