"""Weights, gradients and optimizer state shared out over the ranks (FSDP2), and the checkpoints of such a run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_lightning.training.checkpoint_files import read_checkpoint
from grpo_lightning.types import UsageError


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


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a strategy's mesh that data is dealt out over; it must be all of it."""
    if mesh["tensor_parallel"].size() > 1:
        raise UsageError(
            f"trainer.strategy.tensor_parallel_size={mesh['tensor_parallel'].size()} (`auto` means all devices of a "
            "node): single layers cannot be split. Use --trainer.strategy fsdp2, or give tensor_parallel_size=1 and "
            "the number of devices as data_parallel_size"
        )
    return mesh["data_parallel"]


def shard(module: nn.Module, parts: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shares the weights out over the ranks of `mesh`; a part's are gathered for its forward and backward.

    The second call does nothing.

    Args:
        module: What is called from outside.
        parts: Its layers. What belongs to none of them is gathered for the whole of the module's forward and backward.
        mesh: Of a single dimension.
    """
    if isinstance(module, FSDPModule):
        return
    trained = any(parameter.requires_grad for parameter in module.parameters())
    for part in parts:
        fully_shard(part, mesh=mesh)
    # The first thing a backward pass needs is what the forward pass used last.
    root = fully_shard(module, mesh=mesh, reshard_after_forward=not trained)
    if not trained and hasattr(root, "reset_iter_state"):
        # FSDP notes every forward for a backward pass, which here never comes.
        module.register_forward_hook(lambda *_: root.reset_iter_state())


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Whole weights on every rank, to call any part of `module` any number of times. Every rank must take part."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    # Weights gathered in inference mode could not be trained on.
    with torch.inference_mode(False), torch.no_grad():
        for part in parts:
            part.unshard()
    # FSDP's hooks cost 0.1 ms at every layer and token, and would take the first part that is called for the whole.
    dicts = [hooks for part in parts for hooks in (part._forward_pre_hooks, part._forward_hooks)]
    originals = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        own = [key for key, hook in hooks.items() if str(hook.__module__).startswith("torch.distributed.fsdp")]
        assert own, "this torch's fully_shard has its hooks elsewhere"
        for key in own:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, original in zip(dicts, originals, strict=True):
            hooks.clear()
            hooks.update(original)
        for part in parts:
            part.reshard()


def assembled(value: Any) -> Any:
    """A sharded tensor as a whole one; anything else as it is. Every rank must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_like(value: Any, like: Any) -> Any:
    """This rank's share of a whole tensor, if `like` is sharded and has its shape; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:
        return value
    # Cloned, for the share would keep the whole tensor in memory.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()
