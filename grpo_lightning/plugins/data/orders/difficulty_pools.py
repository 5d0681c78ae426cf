"""Questions by how often they were solved: those that sometimes are come first."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.plugins.data.orders.adaptive import Adaptive
from grpo_lightning.tasks.orders import Shuffled
from grpo_lightning.types import Question, require

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
        self.rate = torch.full((size,), torch.nan, dtype=torch.float64)  # [questions] pass rates; NaN for new ones

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
