"""`grpo plan`; and what a fit says of its memory: before its first step, and when memory runs out."""

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
from grpo_lightning.types import UsageError, at_least, require

# The phase of a run while one of these functions is on the stack; the outermost counts.
PHASE_OF = {
    "GRPOModule.configure_model": "loading",
    "GRPOModule.validation_step": "validating",
    "Explorer.sample": "exploring",
    "prepare": "log-probs",
    "GRPOModule.training_step": "updating",
}


class MemoryReport(Callback):
    """Prints what each device will hold, before the first step, and adds it to out-of-memory errors.

    Args:
        show: Print the table.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self._process = process_bytes("cpu")  # here, before any weight is read
        self.plan: Plan | None = None  # known when the fit starts

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
        data, device = trainer.datamodule, trainer.strategy.root_device
        strategy = "fsdp2" if isinstance(trainer.strategy, ModelParallelStrategy) else "ddp"
        process = self._process if device.type == "cpu" else process_bytes("cuda")
        devices = Devices(device.type, trainer.world_size, strategy, str(trainer.precision), process)
        validated = data.val_batch_size if trainer.limit_val_batches else 0
        plan = Plan(module, GRPOLoop.find(trainer), devices, longest_prompt(data), validated)
        unbounded = getattr(plan.engine, "max_cache_gib", 0) is None
        return plan.changed("model.engine.max_cache_gib", free_bytes(device) / GIB) if unbounded else plan

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Adds where memory ran out, the table, and the keys that help, as notes."""
        if not out_of_memory_message(exception):
            return
        names = [frame.f_code.co_qualname for frame, _ in walk_tb(exception.__traceback__)]
        phase = next((PHASE_OF[name] for name in names if name in PHASE_OF), "another part of the run")
        # The frames hold the tensors that did not fit.
        exception.__traceback__ = None
        exception.add_note(f"It happened in this phase: {phase}.")
        with suppress(Exception):  # the plan of an unusual model
            plan = self.plan or self._plan(trainer, pl_module)
            exception.add_note(str(plan))
            helps = remedies(plan, phase if phase in PHASES else plan.phase)
            exception.add_note("What helps: " + ("; ".join(helps) or "a smaller model or a larger device"))


@dataclass
class Planner:
    """The settings of a trainer that is never made: its devices may not exist here."""

    settings: Any
    loop: GRPOLoop

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
        here = None if devices.kind == "cuda" else devices.process + available_bytes() / devices.count
        has = memory_gib * GIB if memory_gib else here
        print(f"{model.policy.path}: longest prompt {prompt_tokens} tokens")
        try:
            plan = plan.within(has)
        except Exception as error:
            why = f"the memory of {model.policy.config.model_type} cannot be planned ({first_line(error)})"
            raise UsageError(f"model.policy.path={model.policy.path}: {why}") from error
        peak, phase, fits = max(plan.sums), plan.phase, "give --memory_gib to compare it with a device"
        if has is not None:
            fits = f"it {'fits' if peak <= has else 'does not fit'} {amount(has)}"
        print(plan, f"the peak is {amount(peak)}, {phase}: {fits}", sep="\n", flush=True)
        for remedy in remedies(plan, phase) if has is None or peak > has else ():
            print(f"  {remedy}", flush=True)

    @property
    def devices(self) -> Devices:
        """What the trainer would run on."""
        trainer, strategy = self.settings, self.settings.strategy
        cuda = torch.cuda.is_available() if trainer.accelerator == "auto" else trainer.accelerator != "cpu"
        given = str(trainer.devices)
        number = int(given) if given.isdigit() else len(re.findall(r"\d+", given))  # or their indices
        if given in ("auto", "-1"):
            number = max(1, torch.cuda.device_count() if cuda else 1)
        at_least("trainer.devices", number, 1)
        known = not isinstance(strategy, str) or strategy in ("auto", *StrategyRegistry)
        require(known, f"trainer.strategy={strategy}: give auto, ddp or fsdp2")
        shards = strategy == "fsdp2" or isinstance(strategy, ModelParallelStrategy)
        name, device = "fsdp2" if shards else "ddp", "cuda" if cuda else "cpu"
        return Devices(device, number * int(trainer.num_nodes), name, str(trainer.precision), process_bytes(device))


class Planning(LightningCLI):
    """The command line of `grpo plan`: it makes everything in a configuration of `grpo fit` except the trainer."""

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Makes the parser, with the subcommand `plan`."""
        self.trainer_class = type("PlanningTrainer", (L.Trainer,), {"plan": Planner.plan})
        super().setup_parser(*args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommand, and the arguments that are made for it."""
        return {"plan": {"model", "datamodule"}}

    def before_instantiate_classes(self) -> None:
        """Refuses the same options, and leaves out loggers and callbacks: some write files when they are made."""
        super().before_instantiate_classes()
        self.config.plan.trainer.logger = False
        self.config.plan.trainer.callbacks = None

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """None: the trainer's devices may not exist here."""

    def after_instantiate_classes(self) -> None:
        """Nothing: the weights may not exist here."""

    def _run_subcommand(self, subcommand: str) -> None:
        given = self.config_init.plan
        Planner(given.trainer, given.loop).plan(self.model, self.datamodule, given.memory_gib, given.prompt_tokens)


def longest_prompt(data: TaskData, tried: int = 16) -> int:
    """Tokens of the longest prompt among the `tried` longest texts of the questions that are loaded."""
    longest = sorted(chain(*data.questions.values()), key=lambda question: -len(question.text))[:tried]
    return max((len(data.encode(data.render(question))) for question in longest), default=1)


def process_bytes(kind: str) -> float:
    """Bytes that a process takes now, and 24 MiB for its libraries later; on a GPU, 600 MiB as NVIDIA's tools tell."""
    file = Path("/proc/self/statm")
    pages = int(file.read_text().split()[1]) if file.is_file() else 0
    return 600 * 2**20 if kind == "cuda" else pages * os.sysconf("SC_PAGE_SIZE") + 24 * 2**20


def out_of_memory_message(error: BaseException) -> str:
    """One message for memory that ran out: the reason in one sentence, and the notes; empty for another error."""
    said = re.search("(?i)out of memory|can't allocate memory|not enough memory", str(error))
    if not (isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (said and isinstance(error, RuntimeError))):
        return ""
    notes = getattr(error, "__notes__", ["`grpo plan` with the same options prints what the run would hold"])
    return "\n".join([f"out of memory: {first_line(error).split(' See documentation')[0]}", *notes])
