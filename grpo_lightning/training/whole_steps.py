"""Lightning's trainer kept to whole exploration steps: what stops it, what it validates, when it saves."""

import math
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning import disk
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.grpo.step import Minibatch
from grpo_lightning.training import internals
from grpo_lightning.training.board import rewind
from grpo_lightning.training.checkpoint_files import check_whole_step
from grpo_lightning.training.internals import replaced


class WholeSteps(Callback):
    """Ends, validates and saves between steps, never inside one. Each `GRPOModule` brings one along.

    The last step is validated whatever `trainer.check_val_every_n_epoch` is. A run that is asked to stop ends the step
    first.
    """

    def __init__(self) -> None:
        self.validates_now = False  # True where this start validates before the first step
        self._lent = ExitStack()  # gives the trainer its own settings back, where others hold for a while
        self._savers: list[ModelCheckpoint] = []
        """The checkpoint callbacks that would save at a validation, before the step has ended."""
        self._validated = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Prepares the validation before the first step."""
        if stage != "fit":
            return
        loop = GRPOLoop.find(trainer)
        self.validates_now = loop.validate_first and trainer.current_epoch == 0 and not disk.is_trial(trainer)
        if self.validates_now:
            # Lightning's own validation before training: it leaves the random numbers alone, and no callback counts it
            # as one of the run. It logs nothing; `on_validation_end` does. `on_load_checkpoint` takes it back.
            self._lent.enter_context(replaced(trainer, num_sanity_val_steps=math.inf))

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Prints the policy and the device."""
        policy, device = pl_module.policy, pl_module.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        total = sum(one.numel() for one in policy.parameters()) / 1e6
        trained = sum(one.numel() for one in policy.parameters() if one.requires_grad) / 1e6
        some = f", {trained:.2f} M of them trained" if trained < total else ""
        rank_zero_info(
            f"policy {policy.path}: {total:.2f} M parameters{some}; {trainer.world_size} x {name}, "
            f"precision {trainer.precision}"
        )
        if device.type == "cuda" and trainer.precision == "32-true" and policy.model.dtype == torch.float32:
            rank_zero_info(
                "on a GPU trainer.precision=bf16-mixed takes a fraction of the time of 32-true, with the same float32 "
                "weights: docs/precision.md"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the callbacks that must wait for the end of a step; the logs go on from this step."""
        self._lent.close()
        savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        self._savers = [one for one in savers if internals.saves_at_validation(one, trainer)]
        internals.log_at_step(trainer)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            rewind(logger, trainer.current_epoch)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets whoever sets `trainer.should_stop` wait for the end of the step: no run could go on in its middle."""
        self._validated = False
        least = max(trainer.current_epoch + 1, trainer.fit_loop.min_epochs or 0)
        self._lent.enter_context(replaced(trainer.fit_loop, min_epochs=least))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Minibatch, batch_idx: int
    ) -> None:
        """Lets Lightning validate the last step, after its last update."""
        if batch_idx == GRPOLoop.find(trainer).updates_per_step - 1:
            self._lent.close()
            if trainer.current_epoch + 1 == trainer.max_epochs:
                # Lightning validates a step with which the run stops, if it is one that it may validate.
                self._lent.enter_context(replaced(trainer, check_val_every_n_epoch=1, should_stop=True))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets checkpoints of a step's validation wait for the end of the step."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._validated = True
            internals.save_after_steps(self._savers, True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Logs the validation before the first step."""
        if trainer.sanity_checking and self.validates_now:
            found = pl_module.validated()
            internals.write(trainer, {f"val/{name}": found[name] for name in sorted(found)}, step=-1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets the checkpoints of the step be saved."""
        self._lent.close()
        internals.save_after_steps(self._savers, self._validated or not trainer.enable_validation)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints a line for an EarlyStopping that has ended the run in its last step; Lightning prints none."""
        for stopping in trainer.early_stopping_callbacks:
            ended = stopping.stopping_reason != EarlyStoppingReason.NOT_STOPPED
            if ended and stopping.stopped_epoch == trainer.current_epoch - 1:
                reason = str(stopping.stopping_reason_message).removesuffix(" Signaling Trainer to stop.")
                rank_zero_info(f"EarlyStopping: stopped after step {trainer.current_epoch}. {reason}")
        GRPOLoop.find(trainer).step = None

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leaves the trainer's own options behind."""
        self._lent.close()
        internals.save_after_steps(self._savers, False)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """As `teardown`, which Lightning skips after an exception. The program ends once servers draw no more."""
        self.teardown(trainer, pl_module, "fit")
        if getattr(pl_module.explorer.engine, "draws_elsewhere", False):
            pl_module.teardown("fit")

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuses half a step; lets an EarlyStopping keep the patience that it is given now."""
        if trainer.state.fn == TrainerFn.FITTING:
            check_whole_step(checkpoint, trainer.ckpt_path)
            self.validates_now = False
            self._lent.close()
        for stopping in trainer.early_stopping_callbacks:
            if state := checkpoint["callbacks"].get(stopping.state_key):
                state["patience"] = stopping.patience
