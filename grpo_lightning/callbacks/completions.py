"""Sampled completions and histograms in TensorBoard."""

import html

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.explorer import Exploration
from grpo_lightning.loop import GRPOLoop
from grpo_lightning.types import UsageError


class SampledCompletions(Callback):
    """Shows some of a step's completions with their rewards as a table in TensorBoard's Text tab, and histograms.

    Args:
        every_n_steps: Exploration steps between two tables.
        num_groups: Prompts shown, with all the completions of each.
    """

    def __init__(self, every_n_steps: int = 5, num_groups: int = 2) -> None:
        if every_n_steps < 1 or num_groups < 1:
            raise UsageError(f"completions.every_n_steps={every_n_steps}, num_groups={num_groups}: give 1 or more")
        self.every_n_steps = every_n_steps
        self.num_groups = num_groups

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch % self.every_n_steps or not trainer.is_global_zero:
            return
        loop = GRPOLoop.of(trainer)
        if not isinstance(trainer.logger, TensorBoardLogger) or loop.exploration is None:
            return
        writer, step = trainer.logger.experiment, trainer.fit_loop.epoch_loop._batches_that_stepped
        rows = range(min(self.num_groups * loop.group_size, len(loop.exploration.samples)))
        writer.add_text("completions", as_table(loop.exploration, list(rows)), step)
        samples = loop.exploration.samples
        writer.add_histogram("rollout/length", torch.tensor([len(sample.token_ids) for sample in samples]), step)
        writer.add_histogram("reward/total", torch.tensor(loop.exploration.scores.total).nan_to_num(), step)


def as_table(exploration: Exploration, rows: list[int]) -> str:
    """A Markdown table of completions; what the model wrote is escaped."""
    names = list(exploration.scores.results)
    lines = [
        "| prompt | gold | completion | ended | reward | " + " | ".join(names) + " |",
        "|" + " --- |" * (5 + len(names)),
    ]
    for row in rows:
        sample = exploration.samples[row]
        scores = [f"{value:.2f} {status}" for value, status in exploration.scores.describe(row).values()]
        cells = [sample.prompt.text, sample.answer, sample.text, str(sample.finish_reason)]
        cells = [escape(cell) for cell in cells] + [f"{exploration.scores.total[row]:.2f}", *scores]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text as it stands, inside a Markdown table."""
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>").replace("*", "&#42;").replace("_", "&#95;")
