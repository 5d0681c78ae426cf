"""Reports what memory a run will take before it starts, and where and why memory ran out."""

import inspect
from collections.abc import Callable, Sequence
from types import CodeType, TracebackType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning.policy.policy import first_line
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.explorer import Explorer
from grpo_lightning.training.job import job_of, longest_prompt, process_bytes, spread_of, with_free_memory
from grpo_lightning.training.loop import GRPOLoop
from grpo_lightning.training.memory import CUDA_CONTEXT, PHASES, Estimate, Job, MemoryTable, remedies
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.preparation import Preparation

PHASE_OF: dict[Callable[..., Any], str] = {
    GRPOModule.configure_model: "loading",
    GRPOModule.validation_step: "validating",
    Explorer.sample: "exploring",
    Preparation.cut: "log-probs",
    GRPOModule.training_step: "updating",
}
"""The phase of a run while one of these functions is on the stack."""


class MemoryReport(Callback):
    """Prints what each device will hold, before the first step, and adds it to out-of-memory errors.

    Args:
        show: Print the table.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        # Here, before any weight is read.
        self._process = process_bytes()
        self.job: Job | None = None
        """The run, known when the fit starts."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints the table, on rank 0."""
        if self.show and trainer.is_global_zero:
            self.job = with_free_memory(self._job(trainer, pl_module), trainer.strategy.root_device)
            rank_zero_info(describe(self.job))

    def _job(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Job:
        data = getattr(trainer, "datamodule", None)
        assert isinstance(pl_module, GRPOModule) and isinstance(data, PromptDataModule)
        device = trainer.strategy.root_device.type
        return job_of(
            pl_module,
            GRPOLoop.find(trainer),
            data if trainer.limit_val_batches else None,
            precision=str(trainer.precision),
            spread=spread_of(type(trainer.strategy), trainer.world_size),
            device=device,
            prompt_tokens=longest_prompt(data),
            process=self._process if device == "cpu" else CUDA_CONTEXT,
        )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Adds where memory ran out, the table, and the keys that help, as notes."""
        if not is_out_of_memory(exception):
            return
        phase = phase_of(exception.__traceback__)
        # The frames hold the tensors that did not fit.
        exception.__traceback__ = None
        exception.add_note(f"It happened in this phase: {phase}.")
        try:
            job = self.job or self._job(trainer, pl_module)
            exception.add_note(describe(job))
            helps = remedies(Estimate(job), phase if phase in PHASES else None, job.spread.world_size)
            exception.add_note("What helps: " + ("; ".join(map(str, helps)) or "a smaller model or a larger device"))
        except Exception as error:
            exception.add_note(f"What the run holds could not be worked out: {error}")


def describe(job: Job) -> str:
    """The table, or why there is none."""
    try:
        return str(MemoryTable.from_job(job))
    except Exception as error:
        return f"memory: not known for {job.config.model_type} ({first_line(error)})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a GPU or on this machine."""
    says = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError)
        and any(words in says for words in ("out of memory", "can't allocate memory", "not enough memory"))
    )


def phase_of(traceback: TracebackType | None) -> str:
    """The phase that the run was in: that of the outermost of PHASE_OF on the stack."""
    codes: dict[CodeType, str] = {inspect.unwrap(function).__code__: phase for function, phase in PHASE_OF.items()}
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return codes[traceback.tb_frame.f_code]
        traceback = traceback.tb_next
    return "another part of the run"


def out_of_memory_message(error: BaseException) -> str:
    """One message: the reason in one sentence, and the notes."""
    notes: Sequence[str] = getattr(
        error, "__notes__", ["`grpo plan` with the same options prints what the run would hold"]
    )
    # The message of CUDA continues with the allocator.
    reason = (str(error) or type(error).__name__).strip().splitlines()[0].split(" Of the allocated memory")[0]
    return "\n".join([f"out of memory: {reason}", *notes])
