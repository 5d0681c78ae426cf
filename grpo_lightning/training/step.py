"""One exploration step: what was found, the updates that are made with it, and the time that it takes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.stopping import Passes
from grpo_lightning.policy.policy import Policy
from grpo_lightning.training.explorer import Exploration


@dataclass(slots=True)
class Clock:
    """When the phases of a step begin and end, by `perf_counter`."""

    started: float = field(default_factory=perf_counter)
    explored: float = 0.0
    """The rollouts are there."""
    prepared: float = 0.0
    """The updates are prepared. What observers do then is not part of the step."""
    began: float = 0.0
    """The updates begin."""
    updated: float = 0.0
    """The last update so far has ended. Validation follows, and is not part of the step."""
    validated: float | None = None
    """Validation has ended, where there was one."""

    def seconds(self) -> dict[str, float]:
        """Seconds of the phases that the loop itself runs, and of the whole `step`."""
        return {
            "logp": self.prepared - self.explored,
            "optimise": self.updated - self.began,
            "step": self.updated - self.began + self.prepared - self.started,
        }


@dataclass(slots=True)
class Step:
    """One exploration step of this rank. It is made when the step begins, streamed, reported, and dropped."""

    exploration: Exploration
    """The completions and their scores."""
    packs: list[list[Rollouts]]
    """The packs of each minibatch."""
    passes: Passes
    """The updates so far. Once a stop rule has ended them, the minibatches left change nothing."""
    clock: Clock

    def stream(self, policy: Policy, mu: int) -> Iterator["Minibatch"]:
        """Mu passes over the minibatches: lines 10 and 11 of DeepSeekMath's Algorithm 1.

        Args:
            policy: π_θ; its version tells whether it is still the policy that drew the rollouts.
            mu: μ, the number of passes.
        """
        for _ in range(mu):
            for packs in self.packs:
                yield Minibatch(packs, self.exploration.policy_version == policy.version, self)


class Minibatch:
    """The rollouts of one optimizer update on this rank. The update is made once, after the last pack's backward.

    It is a plain class on purpose: Lightning looks into every dataclass and list of a batch, for tensors to cast.

    Args:
        packs: At most `max_tokens` each, on the module's device. Every rank has as many, so that all ranks sync alike.
        on_policy: Whether π_θ is the policy that drew the rollouts.
        step: The exploration step that the rollouts are of; `Rollouts.row` is an index into its samples.
    """

    def __init__(self, packs: list[Rollouts], on_policy: bool, step: "Step") -> None:
        self.packs = packs
        self.on_policy = on_policy
        self.step = step

    def to(self, device: torch.device | str) -> "Minibatch":
        """Itself: its packs were put on the device when they were cut, and each is used in every pass."""
        return self
