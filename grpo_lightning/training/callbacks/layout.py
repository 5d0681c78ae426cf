"""The page of TensorBoard to open first: a few curves under Custom Scalars."""

import re

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import FIRST_LOOK

Charts = dict[str, list[str]]
"""The metrics of each chart, by its title."""


class FirstLook(Callback):
    """Lays out TensorBoard's tab Custom Scalars: the few curves that tell how a run goes."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the layout into every TensorBoard log, on rank 0."""
        assert isinstance(pl_module, GRPOModule)
        layout = {
            title: ["Multiline", [f"^{re.escape(name)}$" for name in names]]
            for title, names in charts(pl_module, validates=bool(trainer.limit_val_batches)).items()
        }
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars({FIRST_LOOK: layout})


def charts(module: GRPOModule, validates: bool) -> Charts:
    """The charts, in the order to read them.

    Args:
        module: Whether it has a reference, and how it validates.
        validates: Whether there is validation.
    """
    scores = [f"val/{name}" for name in module.evaluation.metrics if "@" in name or name == "greedy"]
    scores = scores if validates else []
    length = ["val/length"] if validates else []
    found = {
        "reward": ["reward/mean"],
        **({f"validation: {module.evaluation.measure}": scores} if scores else {}),
        "length, in tokens": ["rollout/length_mean", *length],
        "length, right and wrong": ["rollout/length_right", "rollout/length_wrong"],
        "right and finished, truncated": ["rollout/right_and_finished", "rollout/truncated"],
        "KL, in nats per token": [*(["policy/kl_ref"] if module.reference is not None else []), "policy/kl_old"],
        "clipped fraction of tokens": ["policy/clip_low", "policy/clip_high"],
        "entropy, in nats per token": ["policy/entropy"],
        "seconds per step": ["time/step", "time/explore", "time/reward", "time/logp", "time/optimise"],
    }
    # A run has one colour: of several runs two curves each can be told apart, hardly more.
    return {
        title if not first else f"{title} ({first // 2 + 1})": names[first : first + 2]
        for title, names in found.items()
        for first in range(0, len(names), 2)
    }
