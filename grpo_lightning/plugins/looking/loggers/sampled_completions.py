"""Completions in files: those sampled in a step, also in every logger that shows text, and predictions."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning import disk, ranks
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.plugins.looking.loggers import json_lines
from grpo_lightning.plugins.looking.loggers.completions_table import as_page, as_table
from grpo_lightning.training.evaluation import record
from grpo_lightning.types import at_least

FILE = "completions.jsonl"
"""The file of the completions, in the folder of a run."""


class SampledCompletions(Callback):
    """Shows some completions of a step with their rewards, and histograms of lengths and rewards.

    The completions go to `completions.jsonl` in `trainer.default_root_dir`, and as a table to every logger that shows
    text: TensorBoard's Text tab, Weights & Biases, MLflow.

    Args:
        every_n_steps: Exploration steps between two tables.
        num_groups: Number of prompts shown, with all their completions.
    """

    def __init__(self, every_n_steps: int = 5, num_groups: int = 2) -> None:
        at_least("completions.every_n_steps", every_n_steps, 1)
        at_least("completions.num_groups", num_groups, 1)
        self.every_n_steps = every_n_steps
        self.num_groups = num_groups

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Removes from the file the completions of steps that a resumed run repeats."""
        if trainer.is_global_zero and not disk.is_trial(trainer):
            json_lines.drop_later(Path(trainer.default_root_dir) / FILE, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes and shows the first groups of the step."""
        if trainer.current_epoch % self.every_n_steps or not trainer.is_global_zero or disk.is_trial(trainer):
            return
        loop = GRPOLoop.find(trainer)
        exploration = loop.current_step.exploration
        rows = range(min(self.num_groups * loop.group_size, len(exploration.samples)))
        step = trainer.current_epoch
        records = [{"step": step + 1} | record(exploration.samples[row], exploration.scores, row) for row in rows]
        json_lines.append(Path(trainer.default_root_dir) / FILE, records)
        for logger in trainer.loggers:
            show(logger, as_table(exploration, rows), step)
            add_histogram: Any = getattr(getattr(logger, "experiment", None), "add_histogram", None)
            if callable(add_histogram):
                lengths = torch.tensor([len(sample.token_ids) for sample in exploration.samples])
                add_histogram("rollout/length", lengths, step)
                add_histogram("reward/total", torch.tensor(exploration.scores.total).nan_to_num(), step)


def show(logger: Any, table: list[list[str]], step: int) -> None:
    """Logs completions with a logger that can show them, as a table or as Markdown; the table's header comes first."""
    experiment: Any = getattr(logger, "experiment", None)
    if callable(getattr(logger, "log_table", None)):
        logger.log_table(key="completions", columns=table[0], data=table[1:], step=step)
    elif callable(getattr(experiment, "add_text", None)):
        experiment.add_text("completions", as_page(table), step)
    elif callable(getattr(experiment, "log_text", None)) and hasattr(logger, "run_id"):
        experiment.log_text(logger.run_id, as_page(table), f"completions/step-{step + 1}.md")


class PredictionWriter(Callback):
    """Writes the completions of `grpo predict` with their scores, one per line.

    Args:
        path: The file; relative to `trainer.default_root_dir`.
    """

    def __init__(self, path: str = "predictions.jsonl") -> None:
        self.path = path
        # Each with the id of its prompt.
        self._rows: list[tuple[int, dict[str, Any]]] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drops the completions of an earlier prediction."""
        self._rows = []

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the completions of a batch, which has as many of each prompt."""
        for index, row in enumerate(outputs):
            self._rows.append((batch.prompts[index * batch.num_real // len(outputs)].id, row))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file in the order of the questions, on rank 0."""
        rows = sorted((row for rank in ranks.gather(self._rows) for row in rank), key=lambda row: row[0])
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / self.path
            disk.write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for _, row in rows))
            rank_zero_info(f"{len(rows)} completions in {path}")
