"""Stop rules: when to leave the μ passes over one step's rollouts. What is left of them then changes nothing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.types import UsageError


class StopRule(ABC):
    """Decides from the updates of one exploration step. The numbers are of all ranks, so all ranks decide alike."""

    @abstractmethod
    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """Whether to stop before the optimizer steps for the last of `updates`.

        Args:
            updates: Diagnostics of the step's updates, two or more; each was taken before its optimizer step.
            num_minibatches: Updates of one pass.
        """

    def ended_by(self, updates: Sequence[Diagnostics], num_minibatches: int) -> str | None:
        """The name of the rule that stops here, if one does."""
        return type(self).__name__ if self(updates, num_minibatches) else None

    @property
    def names(self) -> list[str]:
        """The names `ended_by` may give."""
        return [type(self).__name__]


def last_pass(updates: Sequence[Diagnostics], num_minibatches: int) -> Diagnostics | None:
    """The sums over a pass that the last update completes; None in the middle of a pass."""
    if len(updates) % num_minibatches:
        return None
    first, *others = updates[-num_minibatches:]
    return sum(others, first)


class FixedPasses(StopRule):
    """All μ passes, whatever happens (DeepSeekMath's Algorithm 1)."""

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        return False

    @property
    def names(self) -> list[str]:
        return []


class AllSettled(StopRule):
    """Stops when the tokens are where they should go: at their clip bound, or at their target probability.

    Of the tokens that push (Â and weight not 0), those whose bound lies beyond probability 1 never get there and are
    not counted.

    Args:
        share: Of the counted tokens that must be at their bound, in one whole pass.
    """

    def __init__(self, share: float = 0.9) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"share={share} of AllSettled: give more than 0 and at most 1")
        self.share = share

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        done = last_pass(updates, num_minibatches)
        if done is None:
            return False
        settled = done.clipped_low + done.clipped_high
        return bool(settled >= self.share * (done.pushing - done.unreachable))


class ObjectivePlateau(StopRule):
    """Stops when the objective of `patience` passes in a row has not risen by `min_delta` over the best pass.

    Args:
        patience: Passes without progress that are allowed for before stopping.
        min_delta: Least rise that counts, in units of the objective.
    """

    def __init__(self, patience: int = 1, min_delta: float = 1e-3) -> None:
        if patience < 1:
            raise UsageError(f"patience={patience} of ObjectivePlateau: give 1 pass or more")
        if not min_delta >= 0:
            raise UsageError(f"min_delta={min_delta} of ObjectivePlateau: give 0 or more")
        self.patience = patience
        self.min_delta = min_delta

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        if len(updates) % num_minibatches:
            return False
        passes = [
            sum(float(update.objective) for update in updates[first : first + num_minibatches])
            for first in range(0, len(updates), num_minibatches)
        ]
        best, idle = passes[0], 0
        for objective in passes[1:]:
            if objective > best + self.min_delta:
                best, idle = objective, 0
            else:
                idle += 1
        return idle >= self.patience


class KLAbove(StopRule):
    """Stops when the policy has moved further than `target` from the one that was sampled, by `policy/kl_old`.

    Args:
        target: Largest KL(π_old || π_θ) of an update's tokens, in nats a token.
    """

    def __init__(self, target: float = 0.01) -> None:
        if not target > 0:
            raise UsageError(f"target={target} of KLAbove: give more than 0 nats a token, e.g. 0.01")
        self.target = target

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        return bool(updates[-1].kl_old > self.target * updates[-1].tokens)


class FirstOf(StopRule):
    """Stops as soon as one of several rules does.

    Args:
        rules: The rules, asked in this order.
    """

    def __init__(self, rules: list[StopRule]) -> None:
        if not rules:
            raise UsageError("rules=[] of FirstOf: give at least one stop rule")
        self.rules = rules

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        return self.ended_by(updates, num_minibatches) is not None

    def ended_by(self, updates: Sequence[Diagnostics], num_minibatches: int) -> str | None:
        return next((name for rule in self.rules if (name := rule.ended_by(updates, num_minibatches))), None)

    @property
    def names(self) -> list[str]:
        return [name for rule in self.rules for name in rule.names]


class Passes:
    """The optimizer updates of one exploration step as they happen, and what ended them.

    Args:
        rule: Asked at every update but the first.
        num_minibatches: Updates of one pass.
    """

    def __init__(self, rule: StopRule, num_minibatches: int) -> None:
        self.rule = rule
        self.num_minibatches = num_minibatches
        self.updates: list[Diagnostics] = []
        self.ended_by: str | None = None

    @property
    def num_updates(self) -> int:
        """Updates made so far; the one at which a rule stops is not made."""
        return len(self.updates) - (self.ended_by is not None)

    @property
    def ended(self) -> bool:
        """Whether the rule has ended them."""
        return self.ended_by is not None

    def record(self, update: Diagnostics) -> None:
        """Notes an update before the optimizer makes it, and asks the rule."""
        self.updates.append(update)
        if len(self.updates) > 1:
            self.ended_by = self.rule.ended_by(self.updates, self.num_minibatches)
