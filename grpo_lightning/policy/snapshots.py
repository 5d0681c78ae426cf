"""The policy as it was: π_old of the ratio and π_ref of the KL term."""

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import UsageError


class PolicySnapshot(nn.Module, ABC):
    """Log-probs of the policy as it was at the last `refresh`."""

    is_policy: bool = False
    """Whether right after `refresh` it is the policy itself: as π_old it then makes the first ratios 1."""

    @property
    def exists(self) -> bool:
        """Whether it holds weights of its own."""
        return any(True for _ in self.parameters())

    @abstractmethod
    def refresh(self, policy: Policy) -> None:
        """Takes the policy as it is now."""

    @abstractmethod
    def forward(self, policy: Policy, rollouts: Rollouts) -> Tensor:
        """[N] float32 log-probs of the completion tokens; call it without gradients."""


class RecordedLogp(PolicySnapshot):
    """π_old by its numbers alone: no second copy of the weights.

    Exploration happens with the live weights, before the first update, so their log-probs then are those of π_old. They
    are the policy's own, not the sampler's, on the packs of the updates: so every ratio starts at exactly 1 in any
    precision. The first minibatch costs nothing, since its first update computes them anyway.
    """

    is_policy = True

    def refresh(self, policy: Policy) -> None:
        """Nothing to keep."""

    def forward(self, policy: Policy, rollouts: Rollouts) -> Tensor:
        return policy(rollouts).logp


class FrozenCopy(PolicySnapshot):
    """A frozen copy of the weights: a reference that stays, or is refreshed at the start of every iteration."""

    is_policy = True

    def refresh(self, policy: Policy) -> None:
        if not hasattr(self, "policy"):
            self.policy = copy.deepcopy(policy).requires_grad_(False).eval()
        else:
            self.policy.load_state_dict(policy.state_dict())

    def train(self, mode: bool = True) -> "FrozenCopy":
        """Stays in eval mode, whoever trains the module that holds it: a snapshot has no dropout."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, policy: Policy, rollouts: Rollouts) -> Tensor:
        return self.policy(rollouts).logp


class MovingAverage(FrozenCopy):
    """A reference that follows the policy: π_ref <- alpha π_θ + (1 - alpha) π_ref (TR-DPO, arXiv 2404.09656).

    It moves where another reference is replaced, every `loop.steps_per_iteration` steps.

    Args:
        alpha: How far it goes towards the policy; 1 is a plain refresh.
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
            super().refresh(policy)
            return
        # Sharded weights may be gathered just now, which parameters() shows and state_dict() undoes.
        mine, its = self.policy.state_dict(), policy.state_dict()
        for name, _ in policy.named_parameters():
            mine[name].mul_(1 - self.alpha).add_(its[name], alpha=self.alpha)
