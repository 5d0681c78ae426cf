"""An entropy bonus that changes from update to update."""

from typing import Any

from grpo_lightning.maths.entropy import EntropyBonus
from grpo_lightning.types import require


class AdaptiveEntropy(EntropyBonus):
    """c rises by `delta` after an update whose entropy is at most `target`, and falls by it otherwise, from 0 on.

    It is applied only while the entropy is at most `target`, by the last update: then it holds the entropy near the
    target, whatever the task (Skywork-OR1, arXiv 2505.22312, Sec. 4). Take a target a little under the entropy that the
    run begins with: the paper's is low for a small model.

    Args:
        target: The entropy to keep, in nats per token.
        delta: Step of c.
        largest: Upper bound of c.
    """

    def __init__(self, target: float = 0.2, delta: float = 0.005, largest: float = 1.0) -> None:
        for name, value in (("target", target), ("delta", delta), ("largest", largest)):
            require(value > 0, f"{name}={value} of AdaptiveEntropy: give more than 0")
        self.target, self.delta, self.largest = target, delta, largest
        self.level, self.is_low = 0.0, False

    @property
    def coefficient(self) -> float:
        return self.level if self.is_low else 0.0

    def observe(self, entropy: float) -> None:
        self.is_low = entropy <= self.target
        self.level = min(max(self.level + (self.delta if self.is_low else -self.delta), 0.0), self.largest)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "is_low": self.is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self.is_low = state["level"], state["is_low"]
