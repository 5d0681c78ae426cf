"""`grpo plan`: the memory that each device would need, without weights, devices or files."""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry

from grpo_lightning.engines.kv_memory import CPU_FRACTION, CUDA_FRACTION, GIB
from grpo_lightning.policy.policy import first_line
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.job import job_of, longest_prompt, process_bytes, spread_of
from grpo_lightning.training.loop import GRPOLoop
from grpo_lightning.training.memory import CUDA_CONTEXT, Estimate, MemoryTable, amount, tried
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.types import UsageError, at_least

UNKNOWN_PROMPT = 512
"""Tokens of the longest prompt, where neither the data nor an option tells it."""


class Planner:
    """The settings of a trainer that is never made: its devices may not exist here.

    Args:
        settings: The `trainer` of the configuration.
        loop: The loop of the run.
    """

    def __init__(self, settings: Any, loop: GRPOLoop) -> None:
        self.settings = settings
        self.loop = loop

    def plan(
        self,
        model: GRPOModule,
        datamodule: PromptDataModule,
        memory_gib: float | None = None,
        prompt_tokens: int | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Print the memory that each device would need, and the keys that help if it does not fit. Nothing runs.

        Args:
            model: Its weights are not read.
            datamodule: For the longest prompt.
            memory_gib: Memory of one device in GiB. Without it, that of the devices here.
            prompt_tokens: Tokens of the longest prompt. Without it, that of the training questions.
            ckpt_path: Unused; the configuration of a run may have it.
            weights_only: Unused; the configuration of a run may have it.
        """
        if memory_gib is not None and memory_gib <= 0:
            raise UsageError(f"memory_gib={memory_gib}: give more than 0")
        at_least("prompt_tokens", prompt_tokens, 1)
        device = self.device
        num_devices = self.num_devices
        world_size = num_devices * int(self.settings.num_nodes)
        self.loop.validate(model)
        tokens, source = (prompt_tokens, "--prompt_tokens") if prompt_tokens else self.longest_prompt(model, datamodule)
        job = job_of(
            model,
            self.loop,
            None if self.settings.limit_val_batches == 0 else datamodule,
            precision=precision_of(self.settings.precision),
            spread=spread_of(self.strategy(world_size), world_size),
            device=device,
            prompt_tokens=tokens,
            process=process_bytes() if device == "cpu" else CUDA_CONTEXT,
        )
        print(f"{model.policy.path}: longest prompt {tokens} tokens ({source})")
        has = memory_gib * GIB if memory_gib else device_bytes(device, num_devices)
        try:
            estimate, table = within(Estimate(job), has)
        except Exception as error:
            raise UsageError(
                f"model.policy.path={model.policy.path}: the memory of {model.policy.config.model_type} cannot be "
                f"planned ({first_line(error)})"
            ) from error
        print(table, flush=True)
        peak = f"the peak is {amount(table.peak)}, {table.phase}"
        if has is None:
            print(f"{peak}; give --memory_gib to compare it with a device")
        elif table.peak <= has:
            print(f"{peak}: it fits {amount(has)}")
            return
        else:
            print(f"{peak}: it does not fit {amount(has)}", flush=True)
        for remedy in tried(estimate, devices=world_size, says=trying):
            print(f"  {remedy}", flush=True)

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        accelerator = str(self.settings.accelerator)
        if accelerator == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return "cpu" if accelerator == "cpu" else "cuda"

    @property
    def num_devices(self) -> int:
        """Devices of one node, as the trainer reads them."""
        devices = self.settings.devices
        if isinstance(devices, str) and "," in devices:
            devices = [part for part in devices.split(",") if part.strip()]
        if isinstance(devices, (list, tuple)):
            return len(devices)
        if devices in ("auto", -1, "-1"):
            return max(1, torch.cuda.device_count()) if self.device == "cuda" else 1
        try:
            number = int(devices)
        except ValueError:
            number = 0
        if number < 1:
            raise UsageError(f"trainer.devices={devices}: give a number of devices, 1 or more")
        return number

    def strategy(self, world_size: int) -> type[Strategy]:
        """The class of the strategy that the trainer would use."""
        strategy = self.settings.strategy
        if isinstance(strategy, Strategy):
            return type(strategy)
        if strategy == "auto":
            return DDPStrategy if world_size > 1 else SingleDeviceStrategy
        if strategy not in StrategyRegistry:
            raise UsageError(f"trainer.strategy={strategy}: give auto, ddp or fsdp2")
        return StrategyRegistry[strategy]["strategy"]

    def longest_prompt(self, model: GRPOModule, datamodule: PromptDataModule) -> tuple[int, str]:
        """The tokens of the longest prompt, and where the number comes from."""
        try:
            datamodule.load("fit", model.policy, model.sampling, model.explorer.scorer, validates=False)
        except UsageError as error:
            return UNKNOWN_PROMPT, f"assumed; give --prompt_tokens. {error}"
        return longest_prompt(datamodule), "of the training questions"


class PlanningTrainer(L.Trainer):
    """The trainer of Lightning, with the subcommand that makes none."""

    plan = Planner.plan


def trying(key: str) -> None:
    """Shows what is being tried on standard error: an answer can take half a minute."""
    print(f"  trying {key} ...", file=sys.stderr, flush=True)


def within(estimate: Estimate, has: float | None) -> tuple[Estimate, MemoryTable]:
    """The estimate on a device of `has` bytes, of which an engine takes no more than is free, and its table."""
    job, table = estimate.job, MemoryTable.from_estimate(estimate)
    if has and job.bounds_cache and job.max_cache is None and table.sums[0] > has:
        room = has - table.sums[0] + table["key-value cache"][0]
        fraction = CUDA_FRACTION if job.device == "cuda" else CPU_FRACTION
        estimate = estimate.changed(max_cache=max(0, room * fraction))
        table = MemoryTable.from_estimate(estimate)
    return estimate, table


def precision_of(precision: Any) -> str:
    """Lightning's long name of a precision."""
    names = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "None": "32-true"}
    return names.get(str(precision), str(precision))


def device_bytes(device: str, num_devices: int) -> float | None:
    """Bytes of one device here; None where there is no such device. Processes divide the memory of the machine."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).is_file() and (text := Path(file).read_text().strip()).isdigit():
            limits.append(float(text))
    return min(limits) / num_devices
