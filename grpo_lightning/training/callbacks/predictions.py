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
        self._rows: list[dict[str, Any]] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins with no completion."""
        self._rows = []

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the completions of a batch."""
        self._rows += outputs

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file, on rank 0."""
        rows = [row for rank in ranks.gather(self._rows) for row in rank]
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / self.path
            disk.write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            rank_zero_info(f"{len(rows)} completions in {path}")
