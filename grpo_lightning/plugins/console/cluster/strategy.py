"""Weights, gradients and optimizer state sharded over the ranks (FSDP2), and the checkpoints of such a run."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from grpo_lightning.policy.sharding import assembled, sharded_like
from grpo_lightning.training.checkpoint_files import read_checkpoint


class FSDP2Strategy(ModelParallelStrategy):
    """Shards weights, gradients and optimizer state over all devices: `--trainer.strategy fsdp2`.

    Use it for a model whose optimizer state does not fit one device. Checkpoints are single files, as with any other
    strategy, so a run may continue with other devices or another strategy. They are assembled on rank 0, whose memory
    must hold the weights and the optimizer state.

    Args:
        process_group_backend: Backend of torch.distributed; None takes nccl on GPUs and gloo on CPUs.
        timeout: Time after which a rank no longer waits for other ranks.
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
        """Makes a mesh of all devices."""
        # Lightning's "auto" shards the data over nodes alone.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    lightning_restore_optimizer = True
    """Lightning restores the optimizer, as for other strategies."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns full tensors on rank 0, nothing elsewhere. Every rank must call it."""
        assert self.lightning_module is not None
        return self._assembled(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state of `optimizer`: full tensors on rank 0, nothing elsewhere. Every rank must call it."""
        state = (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        return {**state, "state": {index: self._assembled(values) for index, values in state["state"].items()}}

    def _assembled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns full tensors on the CPU of rank 0, nothing elsewhere."""
        # One after another, so that a device holds a single full tensor at a time.
        full_values = {}
        for name, value in values.items():
            full_value = assembled(value)
            if self.global_rank == 0:
                full_values[name] = full_value.cpu() if isinstance(full_value, Tensor) else full_value
        return full_values

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns the content of the file, with full tensors."""
        # Mapped, so that the ranks of a machine share one copy in memory.
        return read_checkpoint(checkpoint_path, mmap=True, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Gives the module this rank's shards of the weights."""
        assert self.lightning_module is not None
        module = self.lightning_module
        # state_dict() may leave out what a checkpoint need not hold.
        tensors = {**dict(module.named_buffers()), **dict(module.named_parameters(remove_duplicate=False))}
        state = {name: sharded_like(value, tensors.get(name)) for name, value in checkpoint["state_dict"].items()}
        module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives the optimizers this rank's shards of their state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, values in state["state"].items():
                state["state"][index] = {name: sharded_like(value, parameters[index]) for name, value in values.items()}
            optimizer.load_state_dict(state)
