"""An order that asks rarely solved questions again."""

from collections.abc import Sequence
from typing import Any

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.plugins.data.orders.adaptive import Adaptive, RowStream
from grpo_lightning.types import Question, at_least, require


class Replayed(Adaptive):
    """Asks the questions that 1 to `most_solved` of G completions solved again, between those of a shuffled stream.

    Where most groups are all wrong, rare successes teach. The question is replayed, not its completions: the policy
    answers anew, so the rollouts stay on policy.

    Args:
        most_solved: k, the most completions that may be right for a question to be asked again.
        fraction: Fraction of asked questions that are replayed, while any waits.
    """

    def __init__(self, most_solved: int = 2, fraction: float = 0.5) -> None:
        at_least("data.order.most_solved", most_solved, 1)
        require(0 <= fraction <= 1, f"data.order.fraction={fraction}: give 0 to 1")
        self.most_solved, self.fraction = most_solved, fraction

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        super().setup(questions, seed)
        self.stream = RowStream(questions, range(len(questions)), seed)
        self.waiting: list[int] = []
        """Rows to ask again; the first has waited longest."""

    def choose(self, id: int) -> int:
        is_replay = self.chance(id).random() < self.fraction
        return self.waiting.pop(0) if self.waiting and is_replay else self.stream.take()

    def learn(self, row: int, rewards: list[float]) -> None:
        num_solved = sum(reward > RIGHT_ABOVE for reward in rewards)
        if 1 <= num_solved <= self.most_solved and row not in self.waiting:
            self.waiting.append(row)

    def learned(self) -> dict[str, float]:
        return {"order/waiting": len(self.waiting)}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"taken": self.stream.num_taken, "waiting": [*self.waiting]}

    def restore(self, state: dict[str, Any]) -> None:
        self.stream.num_taken = state["taken"]
        self.waiting = [*state["waiting"]]
