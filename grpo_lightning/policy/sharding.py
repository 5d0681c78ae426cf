"""Weights distributed over the ranks of a device mesh (FSDP2)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_lightning.types import UsageError


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the dimension of a strategy's mesh over which data is distributed. Other dimensions are refused."""
    if mesh["tensor_parallel"].size() > 1:
        raise UsageError(
            f"trainer.strategy.tensor_parallel_size={mesh['tensor_parallel'].size()} (`auto` means all devices of a "
            "node): single layers cannot be split. Use --trainer.strategy fsdp2, or give tensor_parallel_size=1 and "
            "the number of devices as data_parallel_size"
        )
    return mesh["data_parallel"]


def shard(module: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shards the weights over the ranks of a mesh, once. A layer's weights are gathered while it computes."""
    if isinstance(module, FSDPModule):
        return
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # Weights used last in the forward pass stay whole: a backward pass begins with them.
    root = fully_shard(module, mesh=mesh, reshard_after_forward=not is_trained)
    if not is_trained and hasattr(root, "reset_iter_state"):
        # FSDP records every forward for a backward pass, which never comes here.
        module.register_forward_hook(lambda *_: root.reset_iter_state())


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Opens a context with whole weights on every rank, for calls of any submodule. Every rank must enter it."""
    shards = [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
    # Weights gathered in inference mode could not be trained.
    with torch.inference_mode(False), torch.no_grad():
        for submodule in shards:
            submodule.unshard()

    # FSDP's hooks cost 0.1 ms per layer and token, and would mistake the first submodule called for the root.
    hook_dicts = [hooks for submodule in shards for hooks in (submodule._forward_pre_hooks, submodule._forward_hooks)]
    originals = [dict(hooks) for hooks in hook_dicts]
    for hooks in hook_dicts:
        fsdp_keys = [key for key, hook in hooks.items() if str(hook.__module__).startswith("torch.distributed.fsdp")]
        assert fsdp_keys, "this torch's fully_shard has its hooks elsewhere"
        for key in fsdp_keys:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, original in zip(hook_dicts, originals, strict=True):
            hooks.clear()
            hooks.update(original)
        for submodule in shards:
            submodule.reshard()


def assembled(value: Any) -> Any:
    """Returns the whole tensor of a sharded tensor; any other value unchanged. Every rank must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    """Returns this rank's shard of a sharded tensor; a whole tensor unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def sharded_like(value: Any, like: Any) -> Any:
    """Returns this rank's shard of a whole tensor, if `like` is sharded and has its shape; else `value` unchanged."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not isinstance(like, DTensor) or not is_whole or value.shape != like.shape:
        return value
    # Cloned: the shard would keep the whole tensor in memory.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()
