"""A stop rule that ends the passes when the objective no longer rises."""

from collections.abc import Sequence

from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.stopping import StopRule
from grpo_lightning.types import at_least


class ObjectivePlateau(StopRule):
    """Stops after `patience` passes in a row whose objective has not risen by `min_delta` over the best pass.

    It makes more passes while they still help, like early stopping by a validation loss.

    Args:
        patience: Largest number of passes in a row without a rise.
        min_delta: Smallest rise that counts, in units of the objective.
    """

    def __init__(self, patience: int = 1, min_delta: float = 1e-3) -> None:
        at_least("patience", patience, 1, "ObjectivePlateau")
        at_least("min_delta", min_delta, 0, "ObjectivePlateau")
        self.patience = patience
        self.min_delta = min_delta

    def __call__(self, updates: Sequence[Diagnostics], num_minibatches: int) -> bool:
        if len(updates) % num_minibatches:
            return False
        objectives = [
            sum(float(update.objective) for update in updates[start : start + num_minibatches])
            for start in range(0, len(updates), num_minibatches)
        ]
        best = 0
        for index, objective in enumerate(objectives):
            if objective > objectives[best] + self.min_delta:
                best = index
        return len(objectives) - 1 - best >= self.patience
