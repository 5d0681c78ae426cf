"""A source of rollouts from a policy that is some steps old, and otherwise like `Synchronous`."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from grpo_lightning.grpo.explore import Exploration
from grpo_lightning.grpo.source import Synchronous
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.sharding import assembled
from grpo_lightning.policy.snapshots import copied, trained_tensors
from grpo_lightning.training.internals import replaced
from grpo_lightning.types import at_least


class EarlierWeights(NamedTuple):
    """The trained weights as they were at the start of a step."""

    step: int
    """The step that began with the weights."""
    version: int
    """`Policy.version` of the weights."""
    weights: dict[str, Tensor]
    """Trained tensors by their names in the policy: sharded as there, or full when read from a checkpoint."""

    @contextmanager
    def put_into(self, policy: Policy) -> Iterator[None]:
        """Gives the policy these weights and their version inside, and restores it afterwards, bit for bit."""
        with trained_tensors(policy, self.weights), replaced(policy, version=self.version):
            yield


class StaleSource(Synchronous):
    """Samples from the policy as it was `lag` steps ago, to study the staleness of asynchronous runs alone.

    With an exact engine the recorded log-probs are exactly the old policy's: there is no numeric mismatch, and no need
    for a second device. The first `lag` steps sample from the initial policy. π_old is the sampler by default;
    `model.old_policy: Proximal` leaves the lag to `objective.correction`.

    The source keeps the trained weights of `lag` steps, also in checkpoints, so that a resumed run continues exactly.

    Args:
        lag: k, the steps between the policy that samples and the policy that learns. 0 is `Synchronous`.
    """

    def __init__(self, lag: int = 1) -> None:
        super().__init__()
        at_least("loop.source.lag", lag, 0)
        self.lag = lag
        self.is_late = lag > 0
        self.num_copies = lag + 1 if lag else 0  # the current weights are copied too, while old weights are in use
        self.earlier: deque[EarlierWeights] = deque(maxlen=lag)
        """The weights of the last steps, the oldest first."""

    def next(self, step: int) -> Exploration:
        policy = self.inputs.policy
        oldest = self.earlier[0] if self.earlier else None
        with oldest.put_into(policy) if oldest else nullcontext():
            exploration = super().next(step)
        metrics = {**exploration.metrics, "rollout/lag": step - oldest.step if oldest else 0}
        if self.lag:
            self.earlier.append(EarlierWeights(step, policy.version, copied(policy)))
        return replace(exploration, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream of questions, and the weights of the last steps. Every rank must call it."""
        states = []
        for earlier in self.earlier:
            weights = {name: assembled(value).cpu() for name, value in earlier.weights.items()}
            states.append(earlier._asdict() | {"weights": weights})
        return super().state_dict() | {"earlier": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with as many of the saved weights as the lag now needs; with too few, some steps lag less."""
        super().load_state_dict(state)
        self.earlier = deque((EarlierWeights(**weights) for weights in state.get("earlier", [])), maxlen=self.lag)
