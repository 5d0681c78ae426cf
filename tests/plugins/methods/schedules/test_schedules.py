"""Warmup and cosine over a run: rates by hand, through stop rules and resumes."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fitting import AfterOne, fit, of_updates, scalars

from grpo_lightning import StepCheckpoint, UsageError, WarmupCosine


def rates_of(num_updates: int, rate: Any = 1.0, **options: float) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule, rates = WarmupCosine(optimizer, **options), []
    schedule.spread(num_updates)
    for _ in range(num_updates):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates


def test_the_rates_by_hand() -> None:
    # Two updates rise to the full rate. The cosine goes down in four: 45, 90, 135 and 180 degrees.
    half = math.sqrt(0.5)
    expected = [0.5, 1.0, 0.1 + 0.45 * (1 + half), 0.55, 0.1 + 0.45 * (1 - half), 0.1]
    assert rates_of(6, warmup=1 / 3, final=0.1) == pytest.approx(expected)
    assert rates_of(6, torch.tensor(1.0), warmup=1 / 3, final=0.1) == pytest.approx(expected)
    assert rates_of(2, warmup=0.0, final=0.0) == pytest.approx([0.5, 0.0])
    assert rates_of(4, warmup=1.0) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates_of(1) == pytest.approx([0.1])
    for options in ({"warmup": 1.5}, {"final": -0.1}):
        with pytest.raises(UsageError, match="0 to 1"):
            rates_of(2, **options)


class Stops(L.Callback):
    """Ends the run after two steps."""

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop |= trainer.current_epoch == 1


def go(folder: Path, steps: int, resume: Any = None, callbacks: Any = (), **loop: Any) -> list[float]:
    """The rate of each update, made or refused, of all starts in the folder."""

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    def schedule(optimizer: torch.optim.Optimizer) -> WarmupCosine:
        return WarmupCosine(optimizer, warmup=1 / 3, final=0.1)

    options: dict[str, Any] = {"optimizer": adam, "lr_scheduler": schedule, "loop": {"mu": 2} | loop}
    fit(folder, [StepCheckpoint(), *callbacks], trainer={"max_epochs": steps}, ckpt_path=resume, **options)
    return [rate for rates in of_updates(folder, "optim/lr") for rate in rates]


def test_it_spans_the_run_through_stop_rules_and_resumes(tmp_path: Path) -> None:
    expected = [0.01 * rate for rate in rates_of(6, warmup=1 / 3, final=0.1)]
    assert go(tmp_path / "whole", 3) == pytest.approx(expected)
    means = [(first + second) / 2 for first, second in zip(expected[::2], expected[1::2], strict=True)]
    assert scalars(tmp_path / "whole")["optim/lr"] == pytest.approx(dict(enumerate(means)))
    # With one of three updates made, the step's other rates are passed over. The refused update logs its rate too, and
    # the third is not tried.
    stopped = go(tmp_path / "stopped", 2, mu=3, stop=AfterOne())
    assert len(stopped) == 4 and stopped[::2] == pytest.approx(expected[::3])
    assert scalars(tmp_path / "stopped")["optim/lr"] == pytest.approx(dict(enumerate(expected[::3])))
    # A run of two steps that goes on to three has the rates of three from there.
    short, loop = [0.01 * rate for rate in rates_of(4, warmup=1 / 3, final=0.1)], {"stop": AfterOne()}
    assert go(tmp_path / "on", 2, **loop)[::2] == pytest.approx(short[::2])
    assert go(tmp_path / "on", 3, "last", **loop)[4::2] == pytest.approx(expected[4::2])
    # One that was stopped goes on bit for bit.
    assert len(go(tmp_path / "cut", 3, callbacks=[Stops()])) == 4
    assert go(tmp_path / "cut", 3, "last") == pytest.approx(expected)
    assert scalars(tmp_path / "cut") == scalars(tmp_path / "whole")
    with pytest.raises(UsageError, match=r"trainer\.max_epochs"):
        go(tmp_path / "endless", -1)
