"""Predictions as a jsonl file."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning.training import disk


class PredictionWriter(Callback):
    """Writes what `grpo predict` finds, one completion a line.

    Args:
        path: Where to; relative to `trainer.default_root_dir`.
    """

    def __init__(self, path: str = "predictions.jsonl") -> None:
        self.path = path
        self._rows: list[dict[str, Any]] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rows = []

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._rows += outputs

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rows = self._rows
        if trainer.world_size > 1:
            ranks: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(ranks, rows)
            rows = [row for rank in ranks for row in rank]
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / self.path
            disk.write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            rank_zero_info(f"{len(rows)} completions in {path}")
