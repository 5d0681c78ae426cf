"""Stop rules: when to end the μ passes over one step's rollouts early. The remaining updates then change nothing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.types import UsageError, at_least


class StopRule(ABC):
    """Decides from the updates of one exploration step. The numbers are sums over ranks, so all ranks decide alike."""

    @abstractmethod
    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """Whether to stop before the last of `updates` is made.

        Args:
            updates: Diagnostics of the step's updates, two or more. Each was taken before the update; the last one is
                not made if the rule stops.
            num_minibatches: Updates of one pass.
        """

    def ended_by(self, updates: Sequence[Diagnostics], num_minibatches: int) -> str | None:
        """The name of the rule that stops here; None if none does."""
        return type(self).__name__ if self(updates, num_minibatches) else None

    @property
    def names(self) -> list[str]:
        """The names that `ended_by` may return."""
        return [type(self).__name__]


def last_pass(updates: Sequence[Diagnostics], num_minibatches: int) -> Diagnostics | None:
    """Diagnostics summed over the pass that ended with the last update; None if a pass is still under way."""
    if len(updates) % num_minibatches:
        return None
    first, *others = updates[-num_minibatches:]
    return sum(others, first)


class FixedPasses(StopRule):
    """Never stops: all μ passes, as in DeepSeekMath's Algorithm 1.

    Every step then does the same work, which makes runs easy to compare.
    """

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """False."""
        return False

    @property
    def names(self) -> list[str]:
        """None: it never stops."""
        return []


class AllSettled(StopRule):
    """Stops when the tokens are where they should go: at their clip bound, or at their target probability.

    Further passes would change little. Of the tokens that push (Â and weight not 0), those whose bound lies beyond
    probability 1 never get there. They are not counted.

    Args:
        fraction: Fraction of the counted tokens that must be at their bound, over one whole pass.
    """

    def __init__(self, fraction: float = 0.9) -> None:
        if not 0 < fraction <= 1:
            raise UsageError(f"fraction={fraction} of AllSettled: give more than 0 and at most 1")
        self.fraction = fraction

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """Whether enough tokens were at their bounds in the pass that just ended."""
        done = last_pass(updates, num_minibatches)
        if done is None:
            return False
        settled = done.clipped_low + done.clipped_high
        return bool(settled >= self.fraction * (done.pushing - done.unreachable))


class ObjectivePlateau(StopRule):
    """Stops after `patience` passes in a row whose objective has not risen by `min_delta` over the best pass.

    Spends passes where they still pay, like early stopping by a validation loss.

    Args:
        patience: Number of passes without progress to tolerate.
        min_delta: Smallest rise that counts, in units of the objective.
    """

    def __init__(self, patience: int = 1, min_delta: float = 1e-3) -> None:
        at_least("patience", patience, 1, "ObjectivePlateau")
        at_least("min_delta", min_delta, 0, "ObjectivePlateau")
        self.patience = patience
        self.min_delta = min_delta

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """Whether the last `patience` passes brought nothing."""
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
    """Stops when the policy is further than `target` from the one that was sampled, by `policy/kl_old`.

    A guard against steps that go too far, as in PPO implementations with a target KL.

    Args:
        target: Largest mean KL(π_old || π_θ) over an update's tokens, in nats per token.
    """

    def __init__(self, target: float = 0.01) -> None:
        if not target > 0:
            raise UsageError(f"target={target} of KLAbove: give more than 0 nats per token, e.g. 0.01")
        self.target = target

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """Whether the last update found the policy too far away."""
        return bool(updates[-1].kl_old > self.target * updates[-1].tokens)


class FirstOf(StopRule):
    """Stops as soon as one of several rules does: a guard and a criterion together.

    Args:
        rules: The rules, asked in this order.
    """

    def __init__(self, rules: list[StopRule]) -> None:
        if not rules:
            raise UsageError("rules=[] of FirstOf: give at least one stop rule")
        self.rules = rules

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        """Whether any of the rules stops."""
        return self.ended_by(updates, num_minibatches) is not None

    def ended_by(self, updates: Sequence[Diagnostics], num_minibatches: int) -> str | None:
        """The name of the first rule that stops; None if none does."""
        return next((name for rule in self.rules if (name := rule.ended_by(updates, num_minibatches))), None)

    @property
    def names(self) -> list[str]:
        """The names of all rules."""
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
        """Updates made so far; the one at which a rule stops is not made, nor is one without any token."""
        return sum(bool(update.tokens) for update in self.updates[: -1 if self.ended else None])

    @property
    def ended(self) -> bool:
        """Whether the rule has ended them."""
        return self.ended_by is not None

    def record(self, update: Diagnostics) -> None:
        """Notes an update before the optimizer makes it, and asks the rule."""
        self.updates.append(update)
        if len(self.updates) > 1:
            self.ended_by = self.rule.ended_by(self.updates, self.num_minibatches)
