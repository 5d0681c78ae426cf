"""One exploration step: the parts of GRPO that make it, its micro-batches and minibatches, and those who follow it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.grpo.explore import Exploration, Explorer
from grpo_lightning.maths.advantages import AdvantageEstimator
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.stopping import Passes
from grpo_lightning.policy.compute import Layout, TokenLogp
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import PolicySnapshot
from grpo_lightning.types import Sample


@dataclass(slots=True, frozen=True)
class Parts:
    """The parts of GRPO. Each is one class, which a configuration can exchange."""

    policy: Policy
    """π_θ."""
    old_policy: PolicySnapshot
    """π_old."""
    reference: PolicySnapshot | None
    """π_ref; None: nothing reads it."""
    explorer: Explorer
    """Engine and rewards."""
    sampling: Sampling
    advantage: AdvantageEstimator
    objective: Objective


@dataclass(slots=True)
class MicroBatch:
    """Rollouts that fit into one forward and backward, and what belongs to these."""

    rollouts: Rollouts
    layout: Layout | None = None
    """Where the forward puts the tokens; made once for all passes."""
    scored: TokenLogp | None = None
    """What the last update's forward found, without gradient; None: there was none."""
    updated: bool = False
    """True if an update was made with it. One that a stop rule refused or that was not finite was not."""

    @property
    def is_idle(self) -> bool:
        """True for the micro-batch of a rank with less to do: it is of no completion."""
        return int(self.rollouts.row[0]) < 0


class Minibatch:
    """The rollouts of one optimizer update on this rank.

    The update is made once, after the backward of the last micro-batch.

    Args:
        packs: At most `max_tokens` each, on the policy's device. Every rank has as many, so that all ranks sync alike.
        on_policy: True if π_θ is the policy that drew the rollouts.
        step: The exploration step that the rollouts are of; `Rollouts.row` is an index into its samples.
    """

    # A plain class: Lightning looks into every dataclass and list of a batch, for float tensors to cast.
    def __init__(self, micro_batches: list[MicroBatch], on_policy: bool, step: "Step") -> None:
        self.micro_batches, self.on_policy, self.step = micro_batches, on_policy, step


@dataclass(slots=True)
class Step:
    """One exploration step of this rank. It is made when the step begins, streamed, reported, and dropped."""

    exploration: Exploration
    micro_batches: list[list[MicroBatch]]
    """The packs of each minibatch."""
    passes: Passes
    """The updates so far; once a stop rule has ended them, `training_step` skips the minibatches left."""
    started: float
    """When it began, by `perf_counter`."""
    prepared: float
    """When its updates were prepared. What observers do then is not part of the step."""
    updated: float = 0.0
    """When the last update so far had ended."""
    updates: list[tuple[bool, dict[str, Tensor]]] = field(default_factory=list)
    """Of each update: True if it was made, and its metrics."""
    learned: dict[str, float] = field(default_factory=dict)
    """What the rewards have learned from the step, as metrics."""
    remarks: list[str] = field(default_factory=list)
    """Why it learned less than it might have, once it has ended."""


@dataclass(slots=True)
class Minibatches:
    """Line 10: the train loader, with a length, and a generator that starts only when the step has been explored.

    Without a length Lightning would fetch a batch ahead, before the exploration that makes it.
    """

    step: Callable[[], Step]
    """Returns the step under way."""
    policy: Policy
    """π_θ; its version tells if it is still the policy that drew the rollouts."""
    mu: int
    num_minibatches: int

    def __len__(self) -> int:
        return self.mu * self.num_minibatches

    def __iter__(self) -> Iterator[Minibatch]:
        step = self.step()
        for _ in range(self.mu):
            for micro_batches in step.micro_batches:
                yield Minibatch(micro_batches, step.exploration.policy_version == self.policy.version, step)


class Observer:
    """Follows exploration steps, as a progress bar does: data or callback that is an `Observer` is told of them."""

    def exploring(self, num_completions: int) -> None:
        """A step, or another round of it, begins to sample `num_completions` on this rank."""

    def explored(self, sample: Sample) -> None:
        """One of them has ended."""

    def rewarded(self, mean: float) -> None:
        """The mean reward of the step, over all ranks, is known."""

    def prepared(self, step: Step) -> None:
        """The packs are there. Forwards may be made here, as many on each rank; the step's clock does not run."""

    def updated(self, step: Step) -> None:
        """The last update was made, or a stop rule ended them. The packs are still there; validation comes later."""

    def reported(self, metrics: Mapping[str, float]) -> None:
        """The step has ended, validation included; these are its own metrics, over all ranks."""
