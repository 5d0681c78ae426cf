"""One exploration step: what was found, the updates that are made with it, and the time that it takes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.stopping import Passes
from grpo_lightning.policy.policy import Policy
from grpo_lightning.training.explorer import Exploration

MAXIMA = ("policy/ratio_max", "policy/logp_gap")
"""The metrics of an update that are maxima."""


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
    """The last update so far has ended."""
    validating: float = 0.0
    """Validation begins. It is not part of the step, wherever it stands."""
    validation: float | None = None
    """Seconds of validation so far; None if there was none."""
    between: float = 0.0
    """Seconds of validation before the last update so far: `trainer.val_check_interval` puts it between updates."""

    def update_ends(self) -> None:
        """Notes the end of an update."""
        self.updated, self.between = perf_counter(), self.validation or 0.0

    def validation_starts(self) -> None:
        """Notes the beginning of a validation."""
        self.validating = perf_counter()

    def validation_ends(self) -> None:
        """Adds the validation that has begun last."""
        self.validation = (self.validation or 0.0) + perf_counter() - self.validating

    def seconds(self) -> dict[str, float]:
        """Seconds of the phases that the loop itself runs, and of the whole `step`."""
        optimise = self.updated - self.began - self.between
        seconds = {
            "logp": self.prepared - self.explored,
            "optimise": optimise,
            "step": optimise + self.prepared - self.started,
        }
        return seconds if self.validation is None else seconds | {"validate": self.validation}


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
    updates: list[tuple[bool, dict[str, Tensor]]] = field(default_factory=list)
    """Of each update whether it was made, and its metrics."""
    remarks: list[str] = field(default_factory=list)
    """Why it learned less than it might have, once it has ended."""

    def metrics_of_updates(self) -> dict[str, Tensor]:
        """Means and maxima over the updates that were made; of a metric that none of these has, over the others."""
        found = {}
        for name in dict.fromkeys(name for _, metrics in self.updates for name in metrics):
            values = [metrics[name] for made, metrics in self.updates if made and name in metrics]
            values = values or [metrics[name] for _, metrics in self.updates if name in metrics]
            found[name] = torch.stack(values).max() if name in MAXIMA else torch.stack(values).mean()
        return found

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
