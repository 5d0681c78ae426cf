"""The command `grpo plan`, and the table of memory that a fit prints, first or when memory runs out."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from traceback import walk_tb
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.plugins.compute.planning.memory import PHASES, Devices, Plan, amount, remedies
from grpo_lightning.plugins.engines.native.kv_memory import GIB, available_bytes, free_bytes
from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.training.checks import check_loop
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import UsageError, at_least

PHASE_BY_FUNCTION = {
    "GRPOModule.configure_model": "loading",
    "GRPOModule.validation_step": "validating",
    "Explorer.sample": "exploring",
    "prepare": "log-probs",
    "GRPOModule.training_step": "updating",
}
"""The phase of a run while one of these functions is on the stack; the outermost counts."""


class MemoryReport(Callback):
    """Prints the memory that each device will need, before the first step, and adds it to out-of-memory errors.

    Args:
        show: Print the table.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        # Measured here, before any weight is read.
        self._process = process_bytes("cpu")
        self.plan: Plan | None = None
        """The plan of the fit, known on rank 0 when the fit has started and the table was printed."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints the table, on rank 0."""
        if self.show and trainer.is_global_zero:
            plan = self._plan(trainer, pl_module)
            try:
                rank_zero_info(str(plan))
                self.plan = plan
            except Exception as error:
                rank_zero_info(f"memory: not known for {plan.policy.config.model_type} ({first_line(error)})")

    def _plan(self, trainer: Any, module: Any) -> Plan:
        data = trainer.datamodule
        device = trainer.strategy.root_device
        strategy = "fsdp2" if isinstance(trainer.strategy, ModelParallelStrategy) else "ddp"
        process = self._process if device.type == "cpu" else process_bytes("cuda")
        devices = Devices(device.type, trainer.world_size, strategy, str(trainer.precision), process)
        validated = data.val_batch_size if trainer.limit_val_batches else 0
        plan = Plan(module, GRPOLoop.find(trainer), devices, longest_prompt(data), validated)
        is_unbounded = getattr(plan.engine, "max_cache_gib", 0) is None
        return plan.changed("model.engine.max_cache_gib", free_bytes(device) / GIB) if is_unbounded else plan

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Adds notes to an out-of-memory error: the phase of the run, the table, and the keys that help."""
        if not out_of_memory_message(exception):
            return
        names = [frame.f_code.co_qualname for frame, _ in walk_tb(exception.__traceback__)]
        phase = next(
            (PHASE_BY_FUNCTION[name] for name in names if name in PHASE_BY_FUNCTION), "another part of the run"
        )
        # The frames hold the tensors that did not fit.
        exception.__traceback__ = None
        exception.add_note(f"It happened in this phase: {phase}.")
        with suppress(Exception):  # the plan of an unusual model
            plan = self.plan or self._plan(trainer, pl_module)
            exception.add_note(str(plan))
            advice = "; ".join(remedies(plan, phase if phase in PHASES else plan.phase))
            exception.add_note(f"What helps: {advice or 'a smaller model or a larger device'}")


@dataclass
class Planner:
    """The command `grpo plan`. The run's trainer is never made, since its devices may not exist here."""

    settings: Any
    """The arguments of the trainer."""
    loop: GRPOLoop
    """The run's loop."""

    def plan(
        self,
        model: GRPOModule,
        datamodule: TaskData,
        memory_gib: float | None = None,
        prompt_tokens: int | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Print the memory that each device would need, and the keys that help if it does not fit. Nothing runs.

        Args:
            model: Its weights are not read.
            datamodule: For the longest prompt.
            memory_gib: Memory of one device in GiB. Without it, what a CPU has left, divided among the processes.
            prompt_tokens: Tokens of the longest prompt. Without it, the training questions are read.
            ckpt_path: Unused; the configuration of a run may have it.
            weights_only: Unused; the configuration of a run may have it.
        """
        at_least("memory_gib", memory_gib, 0.001)
        at_least("prompt_tokens", prompt_tokens, 1)
        devices = self.devices
        model.connect(datamodule)
        check_loop(self.loop, model)
        if prompt_tokens is None:
            datamodule.load("fit", model.policy, model.sampling, model.explorer.scorer, validates=False)
            prompt_tokens = longest_prompt(datamodule)
        validated = 0 if self.settings.limit_val_batches == 0 else datamodule.val_batch_size
        plan = Plan(model, self.loop, devices, prompt_tokens, validated)

        # The device to compare with. Of a GPU nothing is known here.
        device_bytes = None if devices.kind == "cuda" else devices.process + available_bytes() / devices.count
        if memory_gib:
            device_bytes = memory_gib * GIB
        print(f"{model.policy.path}: longest prompt {prompt_tokens} tokens")
        try:
            plan = plan.within(device_bytes)
        except Exception as error:
            raise UsageError(
                f"model.policy.path={model.policy.path}: the memory of {model.policy.config.model_type} cannot be "
                f"planned ({first_line(error)})"
            ) from error

        peak = max(plan.sums)
        verdict = "give --memory_gib to compare it with a device"
        if device_bytes is not None:
            verdict = f"it {'fits' if peak <= device_bytes else 'does not fit'} {amount(device_bytes)}"
        print(plan, f"the peak is {amount(peak)}, {plan.phase}: {verdict}", sep="\n", flush=True)
        if device_bytes is None or peak > device_bytes:
            for remedy in remedies(plan, plan.phase):
                print(f"  {remedy}", flush=True)

    @property
    def devices(self) -> Devices:
        """The devices that the trainer would use."""
        trainer = self.settings
        strategy = trainer.strategy
        is_cuda = torch.cuda.is_available() if trainer.accelerator == "auto" else trainer.accelerator != "cpu"
        # A number of devices, or their indices.
        text = str(trainer.devices)
        number = int(text) if text.isdigit() else len(re.findall(r"\d+", text))
        if text in ("auto", "-1"):
            number = max(1, torch.cuda.device_count() if is_cuda else 1)
        at_least("trainer.devices", number, 1)
        if isinstance(strategy, str) and strategy not in ("auto", *StrategyRegistry):
            raise UsageError(f"trainer.strategy={strategy}: give auto, ddp or fsdp2")
        shards = strategy == "fsdp2" or isinstance(strategy, ModelParallelStrategy)
        kind = "cuda" if is_cuda else "cpu"
        return Devices(
            kind=kind,
            count=number * int(trainer.num_nodes),
            strategy="fsdp2" if shards else "ddp",
            precision=str(trainer.precision),
            process=process_bytes(kind),
        )


class PlanningTrainer(L.Trainer):
    """A trainer that is never made: LightningCLI reads the options of `grpo plan` from its methods' signatures."""

    plan = Planner.plan


class Planning(LightningCLI):
    """The command line of `grpo plan`. It makes everything in a configuration of `grpo fit` except the trainer."""

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Makes the parser, with the subcommand `plan`."""
        self.trainer_class = PlanningTrainer
        super().setup_parser(*args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns the subcommand, and the names of its arguments that are objects to be made."""
        return {"plan": {"model", "datamodule"}}

    def before_instantiate_classes(self) -> None:
        """Refuses the options that a fit refuses, and removes loggers and callbacks: some write files when made."""
        super().before_instantiate_classes()
        self.config.plan.trainer.logger = False
        self.config.plan.trainer.callbacks = None

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Makes no trainer: its devices may not exist here."""

    def after_instantiate_classes(self) -> None:
        """Reads no weights: they may not exist here."""

    def _run_subcommand(self, subcommand: str) -> None:
        options = self.config_init.plan
        planner = Planner(options.trainer, options.loop)
        planner.plan(self.model, self.datamodule, options.memory_gib, options.prompt_tokens)


def longest_prompt(data: TaskData, num_tried: int = 16) -> int:
    """Returns the tokens of the longest prompt, among questions with images and the `num_tried` longest texts."""
    longest = sorted(chain(*data.questions.values()), key=lambda question: -len(question.text))
    tried = longest[:num_tried] + [question for question in longest[num_tried:] if question.images]
    return max((data.num_tokens(question, data.render(question)) for question in tried), default=1)


def process_bytes(kind: str) -> float:
    """Returns the bytes of this process and 24 MiB for libraries still to come; on a GPU 600 MiB, by NVIDIA's tools."""
    file = Path("/proc/self/statm")
    pages = int(file.read_text().split()[1]) if file.is_file() else 0
    return 600 * 2**20 if kind == "cuda" else pages * os.sysconf("SC_PAGE_SIZE") + 24 * 2**20


def out_of_memory_message(error: BaseException) -> str:
    """Returns one message if memory ran out: the reason in one sentence, and the notes. Empty for another error."""
    has_words = re.search("(?i)out of memory|can't allocate memory|not enough memory", str(error))
    is_runtime_error = has_words and isinstance(error, RuntimeError)
    if not (isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_runtime_error):
        return ""
    notes = getattr(error, "__notes__", ["`grpo plan` with the same options prints what the run would hold"])
    return "\n".join([f"out of memory: {first_line(error).split(' See documentation')[0]}", *notes])
