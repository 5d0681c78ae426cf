"""The validations of a run, as those who show its progress need them."""

from typing import Any

import lightning as L

from grpo_lightning.training.loop import GRPOLoop
from grpo_lightning.training.module import GRPOModule

Scores = dict[str, float]
"""The metrics of one validation, without `val/`."""


def scores_of(trainer: L.Trainer) -> Scores:
    """What the validation that has just ended found. Every rank must call it."""
    metrics: dict[str, Any] = trainer.callback_metrics
    return {name.removeprefix("val/"): float(metrics[name]) for name in sorted(metrics) if name.startswith("val/")}


def measure_of(pl_module: L.LightningModule) -> str:
    """What avg@k and greedy are: `fraction right by MathVerifier`, or `mean of my_rewards.brief`."""
    assert isinstance(pl_module, GRPOModule)
    return pl_module.evaluation.measure


def is_sanity_check(trainer: L.Trainer) -> bool:
    """Whether Lightning only checks that validation works, by `trainer.num_sanity_val_steps`: it says nothing."""
    return bool(trainer.sanity_checking) and not GRPOLoop.find(trainer).validates_now


def headline(scores: Scores) -> Scores:
    """The two numbers to read first: avg@k, which GRPO improves most directly, and greedy."""
    average = [name for name in scores if name.startswith("avg@")]
    return {name: scores[name] for name in [*average, "greedy"] if name in scores}
