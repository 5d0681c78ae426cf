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
    """Computes Â, the advantages, from rewards."""
    objective: Objective
    """J, which the updates maximise."""


@dataclass(slots=True)
class MicroBatch:
    """Rollouts that go through one forward and backward together, and the results."""

    rollouts: Rollouts
    """The completions, on the policy's device, with every column that the objective reads."""
    layout: Layout | None = None
    """The place of each token in the input of the forward; made once for all passes."""
    scored: TokenLogp | None = None
    """The log-probs and entropies of the last update's forward, without gradient; None before the first update."""
    updated: bool = False
    """True if the optimizer has made an update with it: a stop rule or an infinite gradient can prevent it."""

    @property
    def is_idle(self) -> bool:
        """True if it holds no completion, and only makes this rank run as many forwards as the others."""
        return int(self.rollouts.sample_index[0]) < 0


class Minibatch:
    """The rollouts of one optimizer update on this rank.

    The update is made once, after the backward of the last micro-batch.

    Args:
        micro_batches: At most `loop.max_tokens` tokens each. Every rank has the same number, so that all ranks exchange
            gradients together.
        on_policy: True if π_θ is still the policy that sampled the rollouts.
        step: The exploration step that has sampled the rollouts.
    """

    # A plain class: Lightning looks into every dataclass and list of a batch, for float tensors to cast.
    def __init__(self, micro_batches: list[MicroBatch], on_policy: bool, step: "Step") -> None:
        self.micro_batches = micro_batches
        self.on_policy = on_policy
        self.step = step


@dataclass(slots=True)
class Step:
    """One exploration step on this rank: its exploration, and the results of its updates.

    The loop makes it after the exploration, before the first update, and drops it when the next step begins.
    """

    exploration: Exploration
    """The samples, their scores, and the rollouts with all columns."""
    micro_batches: list[list[MicroBatch]]
    """The micro-batches of each minibatch, until the step is reported."""
    passes: Passes
    """Records the updates. Once a stop rule has ended the passes, `training_step` skips the remaining minibatches."""
    started_at: float
    """Time at which the step began, in seconds of `perf_counter`."""
    prepared_at: float
    """Time at which its first update could begin. Observers run next, and their time does not count in the step."""
    updated_at: float = 0.0
    """Time at which its latest update ended."""
    updates: list[tuple[bool, dict[str, Tensor]]] = field(default_factory=list)
    """For each update: True if the optimizer made it, and its metrics."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of reward models and of the order of questions, which learn from the step too."""
    remarks: list[str] = field(default_factory=list)
    """Reasons why the policy learned less from the step than it might have. They are filled in at its end."""


@dataclass(slots=True)
class Minibatches:
    """The train loader: line 10 of Algorithm 1, μ passes over the minibatches of the current step.

    It has a length on purpose: without it Lightning would fetch the first batch before the exploration that makes it.
    """

    step: Callable[[], Step]
    """Returns the current step."""
    policy: Policy
    """π_θ. Its version tells whether the rollouts of a minibatch are still on policy."""
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
