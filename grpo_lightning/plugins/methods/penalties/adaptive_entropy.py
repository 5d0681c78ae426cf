"""An entropy bonus that changes from update to update."""

from typing import Any

from grpo_lightning.maths.entropy import EntropyBonus
from grpo_lightning.types import require


class AdaptiveEntropy(EntropyBonus):
    """Raises the coefficient c of the entropy while the entropy is at most `target`, and lowers it otherwise.

    c begins at 0, and changes by `delta` after each update. The bonus is applied only if the entropy in the last update
    was at most `target`. So the entropy stays near the target on any task (Skywork-OR1, arXiv 2505.22312, Sec. 4). A
    good target is a little below the entropy at the start of the run. The default is the paper's, which is low for a
    small model.

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
        """c, while the bonus is applied."""
        self.is_low = False
        """True if the entropy of the last update was at most `target`."""

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
