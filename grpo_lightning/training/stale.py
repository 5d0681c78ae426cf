"""A source of rollouts whose policy is some steps old, without any other difference."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.sharding import assembled
from grpo_lightning.policy.trained_copy import copied, trained_tensors
from grpo_lightning.training.explorer import Exploration
from grpo_lightning.training.source import Synchronous
from grpo_lightning.types import at_least

LAG = "rollout/lag"


@dataclass(slots=True)
class EarlierWeights:
    """The trained weights as they were at the start of a step."""

    step: int
    version: int
    """`Policy.version` of them."""
    weights: dict[str, Tensor]
    """By their names in the policy. Sharded ones are sharded; read from a checkpoint they are whole."""

    @classmethod
    def of(cls, policy: Policy, step: int) -> "EarlierWeights":
        """A copy of the weights as they are now."""
        return cls(step, policy.version, copied(policy))

    @contextmanager
    def put_into(self, policy: Policy) -> Iterator[None]:
        """The policy has these weights and their version inside, and its own again afterwards, bit for bit."""
        version = policy.version
        with trained_tensors(policy, self.weights):
            policy.version = self.version
            try:
                yield
            finally:
                policy.version = version

    def state_dict(self) -> dict[str, Any]:
        """Whole weights on the CPU, the same on every rank."""
        weights = {name: assembled(value).cpu() for name, value in self.weights.items()}
        return {"step": self.step, "version": self.version, "weights": weights}


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
        self.earlier: deque[EarlierWeights] = deque(maxlen=lag)
        """The weights of the last steps, the oldest first."""

    @property
    def is_late(self) -> bool:  # type: ignore[override]
        """Whether there is a lag."""
        return self.lag > 0

    @property
    def num_copies(self) -> int:  # type: ignore[override]
        """One for each step, and the current weights while the old ones are in use."""
        return self.lag + 1 if self.lag else 0

    def next(self, step: int) -> Exploration:
        """Samples and scores with the oldest weights that it keeps, then keeps the current ones."""
        policy, oldest = self.inputs.policy, self.earlier[0] if self.earlier else None
        with oldest.put_into(policy) if oldest else nullcontext():
            exploration = super().next(step)
        exploration.metrics[LAG] = step - oldest.step if oldest else 0
        if self.lag:
            self.earlier.append(EarlierWeights.of(policy, step))
        return exploration

    def state_dict(self) -> dict[str, Any]:
        """The stream of questions, and the weights of the last steps. Every rank must call it."""
        return super().state_dict() | {"earlier": [weights.state_dict() for weights in self.earlier]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, with as many of the weights as the lag now needs; too few lag less for some steps."""
        super().load_state_dict(state)
        self.earlier.clear()
        self.earlier.extend(EarlierWeights(**weights) for weights in state.get("earlier", []))
