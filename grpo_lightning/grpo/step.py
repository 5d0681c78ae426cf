"""The record of one exploration step: the parts of the run, the step's micro-batches and minibatches, its observers."""

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
    """The parts of a run that decide what is learned. Each is one class, which a configuration can exchange."""

    policy: Policy
    """π_θ, the policy that learns."""
    old_policy: PolicySnapshot
    """π_old, the policy at the start of the step."""
    reference: PolicySnapshot | None
    """π_ref; None if nothing reads it."""
    explorer: Explorer
    """The engine that samples, and the rewards."""
    sampling: Sampling
    """Temperature, length limit and filters of sampling."""
    advantage: AdvantageEstimator
    """Makes Â of rewards."""
    objective: Objective
    """J, which the updates maximise."""


@dataclass(slots=True)
class MicroBatch:
    """Rollouts that go through one forward and backward together, and the results."""

    rollouts: Rollouts
    """The completions, on the policy's device, with every column that the objective reads."""
    layout: Layout | None = None
    """The place of each token in the forward; made once for all passes."""
    scored: TokenLogp | None = None
    """The log-probs and entropies of the last update's forward, without gradient; None before the first update."""
    updated: bool = False
    """True if an update was made with it: no stop rule refused the update, and it was finite."""

    @property
    def is_idle(self) -> bool:
        """True if it holds no completion, and only makes this rank run as many forwards as the others."""
        return int(self.rollouts.row[0]) < 0


class Minibatch:
    """The rollouts of one optimizer update on this rank.

    The update is made once, after the backward of the last micro-batch.

    Args:
        micro_batches: At most `loop.max_tokens` tokens each. Every rank has the same number, so that all ranks exchange
            gradients together.
        on_policy: True if π_θ is still the policy that sampled the rollouts.
        step: The exploration step of the rollouts; `Rollouts.row` is an index into its samples.
    """

    # A plain class: Lightning looks into every dataclass and list of a batch, for float tensors to cast.
    def __init__(self, micro_batches: list[MicroBatch], on_policy: bool, step: "Step") -> None:
        self.micro_batches = micro_batches
        self.on_policy = on_policy
        self.step = step


@dataclass(slots=True)
class Step:
    """One exploration step on this rank: what was explored, and what its updates add.

    The loop makes it when the updates are prepared, and drops it when the next step begins.
    """

    exploration: Exploration
    """The samples, their scores, and the rollouts with all columns."""
    micro_batches: list[list[MicroBatch]]
    """The micro-batches of each minibatch, until the step is reported."""
    passes: Passes
    """The updates so far. Once a stop rule has ended the passes, `training_step` skips the remaining minibatches."""
    started: float
    """Time at which the step began, in seconds of `perf_counter`."""
    prepared: float
    """Time at which its updates were prepared. What observers do next is not part of the step."""
    updated: float = 0.0
    """Time at which its last update so far had ended."""
    updates: list[tuple[bool, dict[str, Tensor]]] = field(default_factory=list)
    """For each update: True if it was made, and its metrics."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of what has learned from the step beside the policy: rewards, and the order of questions."""
    remarks: list[str] = field(default_factory=list)
    """Reasons why the step learned less than it might have, once it has ended."""


@dataclass(slots=True)
class Minibatches:
    """The train loader: line 10 of Algorithm 1, μ passes over the minibatches of the current step.

    It has a length, and its generator starts only when the step has been explored. Without a length Lightning would
    fetch a batch ahead, before the exploration that makes it.
    """

    step: Callable[[], Step]
    """Returns the current step."""
    policy: Policy
    """π_θ; its version tells whether it is still the policy that sampled the rollouts."""
    mu: int
    """μ, passes over the rollouts of one step."""
    num_minibatches: int
    """Optimizer updates per pass."""

    def __len__(self) -> int:
        return self.mu * self.num_minibatches

    def __iter__(self) -> Iterator[Minibatch]:
        step = self.step()
        for _ in range(self.mu):
            for micro_batches in step.micro_batches:
                on_policy = step.exploration.policy_version == self.policy.version
                yield Minibatch(micro_batches, on_policy, step)


class Observer:
    """Follows exploration steps, as a progress bar does.

    The loop calls the datamodule and every callback that derive from it. For each update see `Watcher`.
    """

    def exploring(self, num_completions: int) -> None:
        """Is called before a round of sampling with the number of completions that this rank will sample."""

    def explored(self, sample: Sample) -> None:
        """Is called with each completion as soon as it has ended."""

    def rewarded(self, mean: float) -> None:
        """Is called with the mean reward of the step, over all ranks."""

    def prepared(self, step: Step) -> None:
        """Is called when the micro-batches are ready, before the first update.

        Forwards may be made here, the same number on each rank; the step's clock does not run.
        """

    def updated(self, step: Step) -> None:
        """Is called after the last minibatch of the step, while its micro-batches still exist, before validation."""

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Is called at the end of the step, after its validation, with the step's metrics over all ranks."""
