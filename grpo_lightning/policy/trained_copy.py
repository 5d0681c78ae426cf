"""A copy of a policy's trained tensors alone, for snapshots of a policy whose other weights are frozen."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from grpo_lightning.policy import sharding
from grpo_lightning.policy.policy import Policy


class TrainedCopy(nn.Module):
    """The trained tensors of a policy as they are now, under the names that they have in it.

    Args:
        policy: Its adapter is copied.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        for name, value in copied(policy).items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))

    def shard(self, mesh: DeviceMesh) -> None:
        """Shards the tensors over the ranks of `mesh`, as those of the policy are."""
        sharding.shard(self, [], mesh)

    @contextmanager
    def in_place_in(self, policy: Policy) -> Iterator[None]:
        """A context in which `policy` computes with these tensors, in eval mode; afterwards it has its own again."""
        with policy.evaluating(), trained_tensors(policy, self.state_dict()):
            yield


@contextmanager
def trained_tensors(policy: Policy, values: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the trained tensors of `policy` are `values`; afterwards it has its own again, bit for bit.

    Args:
        policy: It may be sharded.
        values: By the names of `trained_state_dict`; sharded as the policy is, or whole.
    """
    own = copied(policy)
    try:
        _write(values, policy)
        yield
    finally:
        _write(own, policy)


def copied(policy: Policy) -> dict[str, Tensor]:
    """A copy of each trained tensor, by its name in the policy."""
    return {name: value.clone() for name, value in policy.trained_state_dict().items()}


@torch.no_grad()
def _write(values: Mapping[str, Tensor], policy: Policy) -> None:
    # Asked for anew: it drops what was gathered of sharded tensors, so that the next forward reads these.
    for name, value in policy.trained_state_dict().items():
        value.copy_(sharding.sharded_like(values[name], value))
