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
    """The dimension of a strategy's mesh over which data is distributed; there must be no other."""
    if mesh["tensor_parallel"].size() > 1:
        raise UsageError(
            f"trainer.strategy.tensor_parallel_size={mesh['tensor_parallel'].size()} (`auto` means all devices of a "
            "node): single layers cannot be split. Use --trainer.strategy fsdp2, or give tensor_parallel_size=1 and "
            "the number of devices as data_parallel_size"
        )
    return mesh["data_parallel"]


def shard(module: nn.Module, parts: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Distributes the weights over the ranks of a mesh, once. Those of a part are gathered while it is passed."""
    if isinstance(module, FSDPModule):
        return
    trained = any(parameter.requires_grad for parameter in module.parameters())
    for part in parts:
        fully_shard(part, mesh=mesh)
    # A backward pass first needs what the forward pass used last.
    root = fully_shard(module, mesh=mesh, reshard_after_forward=not trained)
    if not trained and hasattr(root, "reset_iter_state"):
        # FSDP records every forward for a backward pass, which never comes here.
        module.register_forward_hook(lambda *_: root.reset_iter_state())


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """A context with whole weights on every rank, to call any part any number of times. Every rank must enter it."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    # Weights gathered in inference mode could not be trained.
    with torch.inference_mode(False), torch.no_grad():
        for part in parts:
            part.unshard()
    # FSDP's hooks cost 0.1 ms per layer and token, and would mistake the first submodule called for the root.
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
    """The whole tensor of a sharded one; anything else unchanged. Every rank must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; a whole tensor unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def sharded_like(value: Any, like: Any) -> Any:
    """This rank's shard of a whole tensor, if `like` is sharded and has its shape; anything else unchanged."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not isinstance(like, DTensor) or not is_whole or value.shape != like.shape:
        return value
    # Cloned: the shard would keep the whole tensor in memory.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()
