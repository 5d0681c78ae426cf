"""Stop rules end the μ passes over one step's rollouts early. The remaining updates then change nothing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.types import require


class StopRule(ABC):
    """Decides whether the passes end. The numbers are sums over ranks, so that all ranks decide alike."""

    @abstractmethod
    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """Returns True to end the passes before the last of `updates` is made.

        Args:
            updates: The two or more updates of the exploration step so far; the last is not made yet.
            num_minibatches: Updates per pass.
        """


class FixedPasses(StopRule):
    """Makes all μ passes, as in DeepSeekMath's Algorithm 1.

    Every step does the same work, which makes runs easy to compare.
    """

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        return False


class KLAbove(StopRule):
    """Stops when the KL from the old policy to the policy (`policy/kl_old`) is above `target`.

    A guard against steps that move the policy too far, as in PPO implementations with a target KL.

    Args:
        target: Largest mean KL(π_old || π_θ) over an update's tokens, in nats per token.
    """

    def __init__(self, target: float = 0.01) -> None:
        require(target > 0, f"target={target} of KLAbove: give more than 0 nats per token, e.g. 0.01")
        self.target = target

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        return bool(updates[-1].kl_old > self.target * updates[-1].tokens)


@dataclass(slots=True)
class Passes:
    """Records the optimizer updates of one exploration step, and ends them by a stop rule."""

    rule: StopRule
    """Is called at every update but the first."""
    num_minibatches: int
    """Updates per pass."""
    updates: list[Diagnostics] = field(default_factory=list)
    """The diagnostics of the updates so far, over all ranks."""
    ended_by: str | None = None
    """The class name of the rule that ended the passes; None while they go on."""

    @property
    def ended(self) -> bool:
        """True if the rule has ended the passes."""
        return self.ended_by is not None

    def record(self, update: Diagnostics, is_finite: bool = True) -> None:
        """Records an update before the optimizer makes it. If it is finite, the rule decides whether the passes end."""
        self.updates.append(update)
        if len(self.updates) > 1 and is_finite and self.rule(self.updates, self.num_minibatches):
            self.ended_by = type(self.rule).__name__
