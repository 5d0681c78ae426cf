"""Stop rules: when to end the μ passes over one step's rollouts early. The remaining updates then change nothing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.types import require


class StopRule(ABC):
    """Decides from the updates of one exploration step. The numbers are sums over ranks, so all ranks decide alike."""

    @abstractmethod
    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """True to stop before the last of two or more `updates` is made; a pass has `num_minibatches` of them."""


class FixedPasses(StopRule):
    """Never stops: all μ passes, as in DeepSeekMath's Algorithm 1.

    Every step then does the same work, which makes runs easy to compare.
    """

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        return False


class AllConverged(StopRule):
    """Stops when the tokens are where they should go: at their clip bound, or at their target probability.

    Further passes would change little. Counted are the tokens that push (Â and weight not 0), but for those whose bound
    lies beyond probability 1.

    Args:
        fraction: Fraction of the counted tokens that must be at their bound, over one whole pass.
    """

    def __init__(self, fraction: float = 0.9) -> None:
        require(0 < fraction <= 1, f"fraction={fraction} of AllConverged: give more than 0 and at most 1")
        self.fraction = fraction

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        if len(updates) % num_minibatches:
            return False
        first, *later = updates[-num_minibatches:]
        of_pass = sum(later, first)
        num_converged = of_pass.clipped_low + of_pass.clipped_high
        return bool(num_converged >= self.fraction * (of_pass.has_advantage - of_pass.unreachable))


class KLAbove(StopRule):
    """Stops when the policy is further than `target` from the one that was sampled, by `policy/kl_old`.

    A guard against steps that go too far, as in PPO implementations with a target KL.

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
    """The optimizer updates of one exploration step as they happen, and what ended them."""

    rule: StopRule
    """Asked at every update but the first."""
    num_minibatches: int
    """Updates of one pass."""
    updates: list[Diagnostics] = field(default_factory=list)
    ended_by: str | None = None
    """The name of the rule that ended them."""

    @property
    def ended(self) -> bool:
        """True if the rule has ended them."""
        return self.ended_by is not None

    def record(self, update: Diagnostics, is_finite: bool = True) -> None:
        """Notes an update before the optimizer makes it, and asks the rule if its numbers are finite."""
        self.updates.append(update)
        if len(self.updates) > 1 and is_finite and self.rule(self.updates, self.num_minibatches):
            self.ended_by = type(self.rule).__name__
