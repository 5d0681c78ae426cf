"""Schedules by their names in transformers: the rates of `get_scheduler`, in a run and after a resume."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fitting import fit, of_updates, resumes_exactly
from transformers import TrainingArguments, get_scheduler

from grpo_lightning import StepCheckpoint, TransformersSchedule, UsageError
from grpo_lightning.training.schedules import OptimizerOptions

NUM_UPDATES = 12

SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 1.5},
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 5},
    "warmup_stable_decay": {"num_decay_steps": 4},
}


def optimizer() -> torch.optim.Optimizer:
    """Two groups with rates of their own."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.01, 0.004)]
    return torch.optim.AdamW(groups, lr=0.01)


def rates_of(optimizer: torch.optim.Optimizer, schedule: Any, num_updates: int) -> list[list[float]]:
    """The rates of both groups at each update."""
    rates = []
    for _ in range(num_updates):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [0.0, 0.2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rate_is_that_of_transformers(name: str, warmup: float) -> None:
    options = SCHEDULES[name]
    own = optimizer()
    schedule = OptimizerOptions(
        own, lambda groups: TransformersSchedule(groups, name, warmup, options), NUM_UPDATES
    ).scheduler
    theirs = optimizer()
    warmup_updates = TrainingArguments(warmup_steps=warmup).get_warmup_steps(NUM_UPDATES)
    expected = rates_of(theirs, get_scheduler(name, theirs, warmup_updates, NUM_UPDATES, options), NUM_UPDATES)
    assert rates_of(own, schedule, NUM_UPDATES) == expected
    assert len({tuple(rates) for rates in expected}) > 1 or name == "constant" or not warmup


def test_mistakes_are_told() -> None:
    def schedule(**arguments: Any) -> Any:
        return OptimizerOptions(optimizer(), lambda groups: TransformersSchedule(groups, **arguments), NUM_UPDATES)

    for name in ("cosin", "reduce_lr_on_plateau", "greedy"):
        with pytest.raises(UsageError, match=rf"^name={name} of TransformersSchedule: give one of linear, cosine"):
            schedule(name=name)
    for warmup in (-1, 1.5):
        with pytest.raises(UsageError, match=rf"^warmup={warmup} of TransformersSchedule: "):
            schedule(warmup=warmup)
    with pytest.raises(UsageError, match=r"options=\{'power': 2\} with name=linear, 12 updates .*'power'"):
        schedule(options={"power": 2})
    with pytest.raises(UsageError, match=r"name=warmup_stable_decay, 12 updates and 0 of warmup"):
        schedule(name="warmup_stable_decay")
    with pytest.raises(UsageError, match=r"model\.lr_scheduler=TransformersSchedule: set trainer\.max_epochs"):
        OptimizerOptions(optimizer(), TransformersSchedule, None)


def cosine_over_the_run(optimizer: torch.optim.Optimizer) -> TransformersSchedule:
    return TransformersSchedule(optimizer, "cosine", 2)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def go(folder: Path, steps: int, resume: Any = None) -> list[float]:
    """The rate of each update of all starts in the folder; a step makes two."""
    options: dict[str, Any] = {"optimizer": adamw, "lr_scheduler": cosine_over_the_run, "loop": {"mu": 2}}
    fit(folder, [StepCheckpoint()], trainer={"max_epochs": steps}, ckpt_path=resume, **options)
    return [rate for rates in of_updates(folder, "optim/lr") for rate in rates]


def cosine(num_updates: int) -> list[float]:
    """Two updates rise from 0 to the full rate, the others fall along half a wave that would reach 0 after the run."""
    falling = [0.005 * (1 + math.cos(math.pi * update / (num_updates - 2))) for update in range(num_updates - 2)]
    return [0.0, 0.005, *falling]


def test_a_run_follows_the_schedule_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    assert go(tmp_path, 2) == pytest.approx(cosine(4))
    assert go(tmp_path, 4, "last")[4:] == pytest.approx(cosine(8)[4:])


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    resumes_exactly(tmp_path, lambda: {"optimizer": adamw, "lr_scheduler": cosine_over_the_run}, steps=3, cut=2)
