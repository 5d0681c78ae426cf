"""Predictions as a jsonl file."""

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning import ranks
from grpo_lightning.training import disk


class PredictionWriter(Callback):
    """Writes what `grpo predict` finds, one completion per line.

    Args:
        path: The file; relative to `trainer.default_root_dir`.
    """

    def __init__(self, path: str = "predictions.jsonl") -> None:
        self.path = path
        self._rows: list[tuple[int, dict[str, Any]]] = []
        """The prompt's id and the completion."""

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins with no completion."""
        self._rows = []

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the completions of a batch, of each prompt as many."""
        for index, row in enumerate(outputs):
            self._rows.append((batch.prompts[index * batch.num_real // len(outputs)].id, row))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file in the order of the questions, on rank 0."""
        gathered = [row for rank in ranks.gather(self._rows) for row in rank]
        rows = [row for _, row in sorted(gathered, key=lambda pair: pair[0])]
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / self.path
            disk.write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            rank_zero_info(f"{len(rows)} completions in {path}")
