"""Two orders by how often questions were solved: pools of difficulty, and rare successes asked again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.plugins.orders.adaptive import Adaptive, Stream
from grpo_lightning.tasks.orders import Shuffled
from grpo_lightning.types import Question, at_least, require

POOLS = {"new": 3.0, "middling": 6.0, "hard": 1.0, "easy": 0.5}


class DifficultyPools(Adaptive):
    """Four pools by pass rate: new, middling, hard and easy questions; each has its part in what is asked.

    A group teaches if its rewards differ, so middling questions come most. A question enters their pool once its pass
    rate is above `hard` and below `easy`, and leaves it as the policy learns. Inside a pool the one asked longest ago
    comes next, and new ones come in shuffled order. An empty pool leaves its part to the others.

    Args:
        parts: Proportions in which the pools are asked, by default `{new: 3, middling: 6, hard: 1, easy: 0.5}`; a pool
            that is left out keeps its own.
        hard: Pass rate up to which a question is hard.
        easy: Pass rate from which a question is easy.
        memory: Weight of the earlier groups in a question's pass rate, from 0, the last group alone, to below 1.
    """

    def __init__(
        self, parts: dict[str, float] | None = None, hard: float = 0.0, easy: float = 1.0, memory: float = 0.5
    ) -> None:
        self.parts = POOLS | (parts or {})
        fits = self.parts.keys() == POOLS.keys() and min(self.parts.values()) >= 0 < max(self.parts.values())
        require(fits, f"data.order.parts={parts}: give any of {', '.join(POOLS)}, from 0, and not 0 for all four")
        require(hard < easy, f"data.order.hard={hard}: give less than data.order.easy={easy}")
        require(0 <= memory < 1, f"data.order.memory={memory}: give 0 to less than 1")
        self.hard, self.easy, self.memory = hard, easy, memory

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        super().setup(questions, seed)
        shuffled, size = Shuffled(), len(questions)
        shuffled.setup(questions, seed)
        self.last = torch.empty(size, dtype=torch.int64)
        """[questions] the id under which each was asked last; before that it is below 0, in shuffled order."""
        self.last[torch.tensor(shuffled.next(range(size)))] = torch.arange(-size, 0)
        self.rate = torch.full((size,), torch.nan, dtype=torch.float64)
        """[questions] pass rates; NaN for new ones."""

    def choose(self, id: int) -> int:
        waits = torch.zeros(len(self.rate), dtype=torch.bool)
        waits[[*self.asked.values()]] = True  # for its rewards, which may move it
        pools = {name: pool & ~waits for name, pool in self.pools().items()}
        there = [name for name in POOLS if self.parts[name] and pools[name].any()]
        weights = [self.parts[name] for name in there]
        chosen = pools[self.chance(id).choices(there, weights)[0]] if there else ~waits
        if not chosen.any():  # more questions are asked at once than there are
            chosen = ~chosen
        row = int(torch.where(chosen, self.last, torch.iinfo(torch.int64).max).argmin())
        self.last[row] = id
        return row

    def pools(self) -> dict[str, Tensor]:
        """[questions] bool for each pool."""
        new, hard, easy = self.rate.isnan(), self.rate <= self.hard, self.rate >= self.easy
        return {"new": new, "middling": ~(new | hard | easy), "hard": hard, "easy": easy}

    def learn(self, row: int, rewards: list[float]) -> None:
        before, now = float(self.rate[row]), sum(rewards) / len(rewards)
        self.rate[row] = now if before != before else self.memory * before + (1 - self.memory) * now

    def learned(self) -> dict[str, float]:
        return {f"order/{name}": float(pool.double().mean()) for name, pool in self.pools().items()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"last": self.last.clone(), "rate": self.rate.clone()}

    def restore(self, state: dict[str, Any]) -> None:
        self.last, self.rate = state["last"].clone(), state["rate"].clone()


class Replayed(Adaptive):
    """The shuffled stream, and questions that 1 to `most_solved` of G completions solved are asked again.

    Where most groups are all wrong, a rare success is what teaches. The question is replayed, not its completions: the
    policy answers anew, so the rollouts stay on policy.

    Args:
        most_solved: k, the most completions that may be right for a question to be asked again.
        fraction: Fraction of the questions that are asked again, while there are such.
    """

    def __init__(self, most_solved: int = 2, fraction: float = 0.5) -> None:
        at_least("data.order.most_solved", most_solved, 1)
        require(0 <= fraction <= 1, f"data.order.fraction={fraction}: give 0 to 1")
        self.most_solved, self.fraction = most_solved, fraction

    def setup(self, questions: Sequence[Question], seed: int) -> None:
        super().setup(questions, seed)
        self.stream = Stream(questions, range(len(questions)), seed)
        self.waiting: list[int] = []
        """The rows to ask again, the one that waits longest first."""

    def choose(self, id: int) -> int:
        again = self.chance(id).random() < self.fraction
        return self.waiting.pop(0) if self.waiting and again else self.stream.take()

    def learn(self, row: int, rewards: list[float]) -> None:
        solved = sum(reward > RIGHT_ABOVE for reward in rewards)
        if 1 <= solved <= self.most_solved and row not in self.waiting:
            self.waiting.append(row)

    def learned(self) -> dict[str, float]:
        return {"order/waiting": len(self.waiting)}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"taken": self.stream.taken, "waiting": [*self.waiting]}

    def restore(self, state: dict[str, Any]) -> None:
        self.stream.taken, self.waiting = state["taken"], [*state["waiting"]]
