"""The values of every validation question in a file, for intervals of differences between runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lightning import disk
from grpo_lightning.grpo.step import Observer
from grpo_lightning.plugins.looking.loggers import json_lines
from grpo_lightning.training.evaluation import Evaluation, none_if_nan
from grpo_lightning.training.whole_steps import WholeSteps

VALUES_FILE = "validations.jsonl"
"""The file of the values, in the folder of a run."""


class ValidationValues(Callback, Observer):
    """Writes the values of every validation question to `validations.jsonl` in the run's folder.

    There is a line per validation and set of questions. `grpo report` pairs the questions of two runs by it. `step` is
    the step's x in the curves of `val/`, which is -1 before training; `tokens`, `seconds` and `updates` are sums over
    the steps so far, as in the report. `questions` is a digest: validations with the same digest asked the same
    questions.
    """

    def __init__(self) -> None:
        self._sums = {"tokens": 0.0, "seconds": 0.0, "updates": 0.0}
        """The clocks of the run: sums over its steps."""
        self._records: list[dict[str, Any]] = []
        """The lines of the current step, which wait for its clocks."""
        self._folder: Path | None = None
        """The run's folder on rank 0; None on other ranks and in a trial, which write nothing."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the folder."""
        is_writing = trainer.is_global_zero and not disk.is_trial(trainer)
        self._folder = Path(trainer.default_root_dir) if is_writing else None
        self._records = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Keeps the values for the end of the step, or for the beginning of the training."""
        if trainer.state.fn != TrainerFn.FITTING or not is_validation(trainer):
            return
        step = -1 if trainer.sanity_checking else trainer.current_epoch
        # Every rank gathers the values.
        self._records += [
            record_of(name, evaluation, step)
            for name, evaluation in pl_module.evaluations.items()
            if evaluation.was_asked
        ]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Removes the lines of steps that this start repeats, and writes the validation before training."""
        if self._folder is not None:
            last_step = trainer.current_epoch - 1 if trainer.current_epoch else -2
            json_lines.drop_later(self._folder / VALUES_FILE, last_step)
        self._write()

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Moves the clocks on by the step, and writes its validations."""
        self._sums["tokens"] += metrics.get("rollout/tokens", 0.0)
        self._sums["seconds"] += metrics.get("time/step", 0.0)
        self._sums["updates"] += metrics.get("optim/updates", 1.0)
        self._write()

    def _write(self) -> None:
        if self._folder is not None and self._records:
            records = [record | self._sums for record in self._records]
            json_lines.append(self._folder / VALUES_FILE, records)
        self._records = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the clocks, which a resumed run continues."""
        return dict(self._sums)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the clocks."""
        self._sums = dict(state_dict)


def record_of(name: str, evaluation: Evaluation, step: int) -> dict[str, Any]:
    """Returns the line of a set of questions, without clocks. Every rank must call it."""
    values = {
        metric: [none_if_nan(value) for value in metric_values]
        for metric, metric_values in evaluation.values().items()
        if metric == "greedy" or "@" in metric
    }
    return {
        "name": name,
        "step": step,
        "grader": evaluation.grader_title,
        "questions": evaluation.questions(),
        "k": evaluation.num_samples,
        "values": values,
    }


def is_validation(trainer: Any) -> bool:
    """Returns False where Lightning only checks that validation works (`trainer.num_sanity_val_steps`)."""
    callbacks = trainer.callbacks
    validates_first = any(isinstance(callback, WholeSteps) and callback.validates_now for callback in callbacks)
    return validates_first or not trainer.sanity_checking
