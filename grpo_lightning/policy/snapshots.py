"""Snapshots of the policy: π_old of the ratio and π_ref of the KL term."""

import copy
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy import sharding
from grpo_lightning.policy.architecture import forget_casts
from grpo_lightning.policy.compute import TokenLogp
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Sample, UsageError


class PolicySnapshot(nn.Module, ABC):
    """Log-probs of the policy as it was at the last `refresh`."""

    is_policy: bool = False
    """True if it equals the policy right after `refresh`: as π_old it then makes the first ratios 1."""
    is_proximal: bool = False
    """True if it is π_old of rollouts of an earlier policy too. If not, their sampler's log-probs are log π_old."""
    stays: bool = False
    """True if it is another model, which `refresh` does not change."""

    @property
    def exists(self) -> bool:
        """True if the snapshot holds weights."""
        return any(True for _ in self.parameters())

    def refresh(self, policy: Policy) -> None:
        """Moves the snapshot to the policy as it is now; does nothing if it keeps no weights."""

    def check(self, policy: Policy) -> None:
        """Raises UsageError if the snapshot does not go with the policy, before any weight is read."""

    def begin(self, policy: Policy, samples: Sequence[Sample]) -> None:
        """Receives the samples of a step: `Rollouts.sample_index` of the step's rollouts is an index into them."""

    def scored(self, policy: Policy, rollouts: Rollouts, read: Any = None) -> TokenLogp:
        """Returns what `Policy.forward` returns, computed by the snapshot. Call it without gradients.

        The base class computes it by the policy as it is.

        Args:
            policy: The policy as it is now.
            rollouts: B completions with their prompts.
            read: As for `Policy.forward`.
        """
        return policy(rollouts, read=read)

    def forward(self, policy: Policy, rollouts: Rollouts) -> Tensor:
        """[N] float32 log-probs of the sampled tokens; call it without gradients."""
        return self.scored(policy, rollouts).logp


class RecordedLogp(PolicySnapshot):
    """π_old as recorded log-probs, without a second copy of the weights: the choice for π_old.

    The policy computes the log-probs before the first update, on the micro-batches of the updates. So every ratio
    starts at exactly 1 in any precision. The first minibatch costs nothing, since its first update computes its
    log-probs anyway.
    """

    is_policy = True


class Proximal(RecordedLogp):
    """π_old as the policy at the start of the step, also for rollouts of an earlier policy: decoupled PPO.

    With rollouts of an earlier policy μ, the clip then bounds π_θ/π_old, the distance that the step goes. The distance
    from μ to π_old is corrected by `objective.correction`, or not at all (arXiv 2110.00641; AReaL, arXiv 2505.24298).
    Fresh rollouts are treated as by `RecordedLogp`. With one update per step neither needs a further pass.
    """

    is_proximal = True


class TrainedCopy(nn.Module):
    """The trained tensors of a policy as they are now, under their names in the policy."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        for full_name, value in copied(policy).items():
            *path, leaf = full_name.split(".")
            module: nn.Module = self
            for name in path:
                if name not in module._modules:
                    module.add_module(name, nn.Module())
                module = module.get_submodule(name)
            module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))

    def shard(self, mesh: DeviceMesh) -> None:
        """Shards the tensors over the ranks of `mesh`, as the policy's are."""
        sharding.shard(self, [], mesh)


@contextmanager
def trained_tensors(policy: Policy, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Opens a context in which `policy` has the trained tensors `values`, sharded or whole.

    Afterwards it has its previous tensors again, bit for bit.
    """

    def write(values: Mapping[str, Tensor]) -> None:
        # A new `state_dict` drops whole tensors gathered of shards, so that the next forward reads the new values.
        with torch.no_grad():
            for name, value in policy.trained_state_dict().items():
                value.copy_(sharding.sharded_like(values[name], value))
        forget_casts()

    previous_values = copied(policy)
    try:
        write(values)
        yield
    finally:
        write(previous_values)


def copied(policy: Policy) -> dict[str, Tensor]:
    """Returns a copy of each trained tensor, by its name in the policy."""
    return {name: value.clone() for name, value in policy.trained_state_dict().items()}


class FrozenCopy(PolicySnapshot):
    """A frozen copy of the weights: the usual π_ref, which stays, or is replaced at the start of every iteration.

    It costs the memory of the weights once more; with an adapter it copies the trained tensors alone.
    """

    is_policy = True
    policy: Policy | TrainedCopy
    """The copy; missing before the first `refresh`."""

    def refresh(self, policy: Policy) -> None:
        if hasattr(self, "policy"):
            is_whole = isinstance(self.policy, Policy)
            self.policy.load_state_dict(policy.state_dict() if is_whole else policy.trained_state_dict())
        elif policy.adapter is None:
            self.policy = copy.deepcopy(policy).requires_grad_(False).eval()
        else:
            self.policy = TrainedCopy(policy)

    def train(self, mode: bool = True) -> "FrozenCopy":
        """Stays in eval mode, even if the module that holds it is in training: a snapshot has no dropout."""
        return super().train(False)

    @torch.no_grad()
    def scored(self, policy: Policy, rollouts: Rollouts, read: Any = None) -> TokenLogp:
        if isinstance(self.policy, Policy):
            return self.policy(rollouts, read=read)
        with policy.evaluating(), trained_tensors(policy, self.policy.state_dict()):
            return policy(rollouts, read=read)


class MovingAverage(FrozenCopy):
    """A reference that follows the policy: π_ref <- alpha π_θ + (1 - alpha) π_ref (TR-DPO, arXiv 2404.09656).

    Lets the policy move far in the long run while the KL term still restrains each stretch. It is updated whenever a
    `FrozenCopy` would be refreshed: every `loop.steps_per_iteration` steps, without which it is refused. With an
    adapter it averages the trained tensors, which is not the average of the resulting weights.

    Args:
        alpha: Weight of the policy in the average; 1 is a plain refresh.
    """

    is_policy = False

    def __init__(self, alpha: float = 0.6) -> None:
        super().__init__()
        if not 0 < alpha <= 1:
            raise UsageError(f"alpha={alpha} of MovingAverage: give more than 0 and at most 1; the paper takes 0.6")
        self.alpha = alpha

    @torch.no_grad()
    def refresh(self, policy: Policy) -> None:
        if not hasattr(self, "policy"):
            return super().refresh(policy)
        # If sharded weights are currently gathered, `parameters()` yields whole tensors; `state_dict()` yields shards.
        averages = self.policy.state_dict()
        weights = policy.state_dict()
        for name, _ in policy.named_parameters():
            if name in averages:
                averages[name].mul_(1 - self.alpha).add_(weights[name], alpha=self.alpha)


class AdapterOff(PolicySnapshot):
    """The policy with its adapter switched off: the base model, without a second copy of anything.

    The choice for π_ref of a policy with an adapter. It never changes; `FrozenCopy` and `MovingAverage` can.
    """

    stays = True

    def scored(self, policy: Policy, rollouts: Rollouts, read: Any = None) -> TokenLogp:
        with policy.without_adapter():
            return policy(rollouts, read=read)
