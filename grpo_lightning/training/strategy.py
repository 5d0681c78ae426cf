"""Weights, gradients and optimizer state sharded over the ranks (FSDP2), and the checkpoints of such a run."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor

from grpo_lightning.policy.sharding import assembled, sharded_like
from grpo_lightning.training.checkpoint_files import read_checkpoint


class FSDP2Strategy(ModelParallelStrategy):
    """Shards weights, gradients and optimizer state over all devices: `--trainer.strategy fsdp2`.

    Checkpoints are single files as those of any other strategy, so a run may go on with other devices or another
    strategy. They are put together on rank 0, whose memory must hold the weights and the optimizer's state.

    Args:
        process_group_backend: Of torch.distributed; None takes nccl on GPUs and gloo on CPUs.
        timeout: How long a rank waits for the others.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        # Lightning's "auto" shards the data over nodes alone.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on rank 0, nothing elsewhere. Every rank must call it."""
        assert self.lightning_module is not None
        return self._assembled(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As `lightning_module_state_dict`."""
        state = (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        return {**state, "state": {number: self._assembled(values) for number, values in state["state"].items()}}

    def _assembled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        # One after the other, so that a device holds one whole tensor at a time.
        whole = ((name, assembled(value)) for name, value in values.items())
        kept = ((name, value) for name, value in whole if self.global_rank == 0)
        return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in kept}

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        # Mapped, so that the ranks of a machine share one copy in memory.
        return read_checkpoint(checkpoint_path, mmap=True, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        module = self.lightning_module
        # state_dict() may leave out what a checkpoint need not hold.
        own = {**dict(module.named_buffers()), **dict(module.named_parameters(remove_duplicate=False))}
        state = {name: sharded_like(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for number, values in state["state"].items():
                state["state"][number] = {
                    name: sharded_like(value, parameters[number]) for name, value in values.items()
                }
            optimizer.load_state_dict(state)


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="Weights sharded over all devices (FSDP2)")
