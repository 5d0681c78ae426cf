"""Keeps Lightning's trainer to whole exploration steps: it stops, validates and saves only between them."""

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
    """Ends, validates and saves between steps, never within a step. Each `GRPOModule` adds one to the trainer.

    The last step is always validated, for any `trainer.check_val_every_n_epoch`. A run that gets a signal to stop ends
    the step first.
    """

    def __init__(self) -> None:
        self.validates_now = False
        """True if this start validates before the first step."""
        self._replaced_options = ExitStack()
        """Restores options of the trainer that have another value for a while."""
        self._savers: list[ModelCheckpoint] = []
        """Checkpoint callbacks that would save at a validation, before the step has ended."""
        self._has_validated = False
        """True if the current step has been validated."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Prepares the validation before the first step."""
        if stage != "fit":
            return
        loop = GRPOLoop.find(trainer)
        self.validates_now = loop.validate_first and trainer.current_epoch == 0 and not disk.is_trial(trainer)
        if self.validates_now:
            # Lightning logs nothing of it; `on_validation_end` does. A resumed run takes it back in
            # `on_load_checkpoint`.
            self._replaced_options.enter_context(internals.validating_first(trainer))

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Prints the policy and the device."""
        policy = pl_module.policy
        device = pl_module.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        num_weights = sum(weights.numel() for weights in policy.parameters()) / 1e6
        num_trained = sum(weights.numel() for weights in policy.parameters() if weights.requires_grad) / 1e6
        trained = f", {num_trained:.2f} M of them trained" if num_trained < num_weights else ""
        rank_zero_info(
            f"policy {policy.path}: {num_weights:.2f} M parameters{trained}; {trainer.world_size} x {name}, "
            f"precision {trainer.precision}"
        )
        if device.type == "cuda" and trainer.precision == "32-true" and policy.model.dtype == torch.float32:
            rank_zero_info(
                "on a GPU trainer.precision=bf16-mixed takes a fraction of the time of 32-true, with the same float32 "
                "weights: docs/explanation/precision.md"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the callbacks that must wait for the end of a step, and rewinds the loggers to this step."""
        self._replaced_options.close()
        self._savers = [
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and internals.saves_at_validation(callback, trainer)
        ]
        internals.log_at_step(trainer)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            rewind(logger, trainer.current_epoch)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Defers `trainer.should_stop` to the end of the step; half a step cannot be resumed."""
        self._has_validated = False
        min_epochs = max(trainer.current_epoch + 1, trainer.fit_loop.min_epochs or 0)
        self._replaced_options.enter_context(replaced(trainer.fit_loop, min_epochs=min_epochs))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Minibatch, batch_idx: int
    ) -> None:
        """Makes Lightning validate the last step, after its last update."""
        if batch_idx == GRPOLoop.find(trainer).updates_per_step - 1:
            self._replaced_options.close()
            if trainer.current_epoch + 1 == trainer.max_epochs:
                # Lightning validates the step with which a run stops if `check_val_every_n_epoch` includes it.
                self._replaced_options.enter_context(replaced(trainer, check_val_every_n_epoch=1, should_stop=True))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Defers the checkpoints of a step's validation to the end of the step."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._has_validated = True
            internals.save_after_steps(self._savers, True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Logs the validation before the first step."""
        if trainer.sanity_checking and self.validates_now:
            metrics = pl_module.validated()
            internals.write(trainer, {f"val/{name}": metrics[name] for name in sorted(metrics)}, step=-1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Makes the deferred checkpoints save at the end of the step."""
        self._replaced_options.close()
        internals.save_after_steps(self._savers, self._has_validated or not trainer.enable_validation)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints why an EarlyStopping has ended the run in its last step; Lightning does not."""
        for stopping in trainer.early_stopping_callbacks:
            has_stopped = stopping.stopping_reason != EarlyStoppingReason.NOT_STOPPED
            if has_stopped and stopping.stopped_epoch == trainer.current_epoch - 1:
                reason = str(stopping.stopping_reason_message).removesuffix(" Signaling Trainer to stop.")
                rank_zero_info(f"EarlyStopping: stopped after step {trainer.current_epoch}. {reason}")
        GRPOLoop.find(trainer).step = None

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restores the trainer's options."""
        self._replaced_options.close()
        internals.save_after_steps(self._savers, False)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Calls `teardown`, which Lightning skips after an exception."""
        self.teardown(trainer, pl_module, "fit")
        # The program could not end while servers sample.
        if getattr(pl_module.explorer.engine, "draws_elsewhere", False):
            pl_module.teardown("fit")

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of half a step. The `patience` of an EarlyStopping stays as it is configured now."""
        if trainer.state.fn == TrainerFn.FITTING:
            check_whole_step(checkpoint, trainer.ckpt_path)
            self.validates_now = False
            self._replaced_options.close()
        for stopping in trainer.early_stopping_callbacks:
            if state := checkpoint["callbacks"].get(stopping.state_key):
                state["patience"] = stopping.patience
