"""A source of rollouts whose policy is some steps old, without any other difference."""

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
    version: int  # `Policy.version` of them
    weights: dict[str, Tensor]
    """By their names in the policy. Sharded ones are sharded; read from a checkpoint they are whole."""

    @contextmanager
    def put_into(self, policy: Policy) -> Iterator[None]:
        """The policy has these weights and their version inside, and its own again afterwards, bit for bit."""
        with trained_tensors(policy, self.weights), replaced(policy, version=self.version):
            yield


class StaleSource(Synchronous):
    """Samples from the policy as it was `lag` steps ago: what an asynchronous run learns from, and nothing else.

    With an exact engine the log-probs it records are those of the old weights. So staleness alone can be studied,
    without numeric mismatch and without a second device. The first steps have the oldest policy there is, the initial
    one. π_old is the sampler by default; `model.old_policy: Proximal` leaves the lag to `objective.correction`.

    It keeps the trained weights of `lag` steps, also in checkpoints, so that a resumed run goes on exactly.

    Args:
        lag: k, the steps between the policy that samples and the one that learns. 0 is `Synchronous`.
    """

    def __init__(self, lag: int = 1) -> None:
        super().__init__()
        at_least("loop.source.lag", lag, 0)
        self.lag = lag
        self.is_late = lag > 0
        self.num_copies = lag + 1 if lag else 0  # the current weights too, while the old ones are in use
        self.earlier: deque[EarlierWeights] = deque(maxlen=lag)  # the weights of the last steps, the oldest first

    def next(self, step: int) -> Exploration:
        policy, oldest = self.inputs.policy, self.earlier[0] if self.earlier else None
        with oldest.put_into(policy) if oldest else nullcontext():
            exploration = super().next(step)
        metrics = {**exploration.metrics, "rollout/lag": step - oldest.step if oldest else 0}
        if self.lag:
            self.earlier.append(EarlierWeights(step, policy.version, copied(policy)))
        return replace(exploration, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """The stream of questions, and the weights of the last steps. Every rank must call it."""
        states = []
        for earlier in self.earlier:
            weights = {name: assembled(value).cpu() for name, value in earlier.weights.items()}
            states.append(earlier._asdict() | {"weights": weights})
        return super().state_dict() | {"earlier": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, with as many of the weights as the lag now needs; too few lag less for some steps."""
        super().load_state_dict(state)
        self.earlier = deque((EarlierWeights(**weights) for weights in state.get("earlier", [])), maxlen=self.lag)
