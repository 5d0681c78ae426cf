"""A stop rule that ends the passes once they no longer pay."""

from collections.abc import Sequence

from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.stopping import StopRule
from grpo_lightning.types import at_least


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
        self.patience, self.min_delta = patience, min_delta

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        if len(updates) % num_minibatches:
            return False
        passes = [
            sum(float(update.objective) for update in updates[first : first + num_minibatches])
            for first in range(0, len(updates), num_minibatches)
        ]
        best = 0
        for index, objective in enumerate(passes):
            if objective > passes[best] + self.min_delta:
                best = index
        return len(passes) - 1 - best >= self.patience
