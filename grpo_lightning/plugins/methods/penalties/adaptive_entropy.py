"""An entropy bonus that changes from update to update."""

from typing import Any

from grpo_lightning.maths.entropy import EntropyBonus
from grpo_lightning.types import require


class AdaptiveEntropy(EntropyBonus):
    """Raises c by `delta` after an update whose entropy is at most `target`, and lowers it otherwise, from 0 on.

    The bonus is applied only while the entropy of the last update is at most `target`: it then keeps the entropy near
    the target, whatever the task (Skywork-OR1, arXiv 2505.22312, Sec. 4). A good target is a little below the entropy
    at the start of the run: the default is the paper's, and low for a small model.

    Args:
        target: The entropy to keep, in nats per token.
        delta: Change of c after each update.
        largest: Upper bound of c.
    """

    def __init__(self, target: float = 0.2, delta: float = 0.005, largest: float = 1.0) -> None:
        for name, value in (("target", target), ("delta", delta), ("largest", largest)):
            require(value > 0, f"{name}={value} of AdaptiveEntropy: give more than 0")
        self.target = target
        self.delta = delta
        self.largest = largest
        self.level = 0.0
        self.is_low = False

    @property
    def coefficient(self) -> float:
        return self.level if self.is_low else 0.0

    def observe(self, entropy: float) -> None:
        self.is_low = entropy <= self.target
        self.level = min(max(self.level + (self.delta if self.is_low else -self.delta), 0.0), self.largest)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "is_low": self.is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]
        self.is_low = state["is_low"]
