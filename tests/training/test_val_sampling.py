"""Validation that draws otherwise than training: other filters, other lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Grpo
from helpers.fitting import Digits, fit, scalars
from helpers.tiny import policy_of

from grpo_lightning import GRPOModule, PlainEngine, Sampling, UsageError, Validation, ValidationSampling
from grpo_lightning.engines.engine import Completions

TRAINING = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.8, stop=["ab"])


def test_what_is_not_given_is_as_in_training() -> None:
    assert ValidationSampling().over(TRAINING) == TRAINING
    longer = ValidationSampling(max_new_tokens=99, temperature=0.3, top_k=4, min_p=0.1).over(TRAINING)
    assert longer == Sampling(99, temperature=0.3, top_k=4, top_p=0.8, min_p=0.1, stop=["ab"])
    assert ValidationSampling(stop=[], top_p=1.0).over(TRAINING) == replace(TRAINING, stop=[], top_p=1.0)


class Watched(PlainEngine):
    """Notes the sampling of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Sampling] = []

    def check(self, policy: Any, sampling: Sampling) -> None:
        super().check(policy, sampling)
        self.asked.append(sampling)

    def generate(self, requests: Any, sampling: Sampling, *args: Any, **kwargs: Any) -> Completions:
        self.asked.append(sampling)
        return super().generate(requests, sampling, *args, **kwargs)


def test_training_and_validation_draw_each_as_it_is_told(tmp_path: Path) -> None:
    engine, training = Watched(), Sampling(max_new_tokens=6)
    val = ValidationSampling(max_new_tokens=20, temperature=0.5, top_k=7)
    fit(tmp_path, engine=engine, sampling=training, validation=Validation(samples=2, sampling=val),
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
    greedy = Validation(samples=1, sampling=ValidationSampling(temperature=0.0))
    module = GRPOModule(policy_of(), [Digits()], validation=greedy)
    assert module.val_sampling.greedy and not module.sampling.greedy
    with pytest.raises(UsageError, match="training needs completions that differ"):
        GRPOModule(policy_of(), [Digits()], sampling=Sampling(temperature=0.0))


def test_by_the_command_line(grpo: Grpo) -> None:
    options = ["--model.validation.sampling.max_new_tokens=9", "--model.validation.sampling.temperature=0"]
    options += ["--loop.*!", "--trainer.max_epochs!"]
    for command, name in (("validate", "val"), ("test", "test")):
        grpo.ok(command, *options, "--data.task.train!")
        assert max(scalars(Path("run"))[f"{name}/length"].values()) > 4
